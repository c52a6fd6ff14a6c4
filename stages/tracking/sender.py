"""The thread that tells MLflow, so that training never waits for a store."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ...schemas.safe_text import redacted
from .delivery import Delivery
from .guard import address_of, failures, reason_of
from .mlflow_store import MlflowStore, load
from .quiet import hushed

if TYPE_CHECKING:
    from pathlib import Path

    from .ledger import Ledger

SECONDS_PER_TICK = 1.0
RETRY_SECONDS = 60.0
QUICK_SECONDS = 1.0

logger = logging.getLogger("align")


class Sender:
    """Sends what is new every second; after a failure it leaves the store alone for a minute."""

    def __init__(self, uri: str, ledger: Ledger, metrics: Path) -> None:
        self._uri = uri
        self._ledger = ledger
        self._metrics = metrics
        self._delivery: Delivery | None = None
        self._over = threading.Event()
        self._is_loaded = threading.Event()
        self._retry_at = 0.0
        self._last_took = 0.0
        self._has_warned = False
        self._quiet = ExitStack()
        self._quiet.enter_context(hushed())
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def finish(self, patience: float) -> None:
        """Waits so many seconds for the rest to be sent; what is not stays in the ledger."""
        self._over.set()
        self._is_loaded.wait()  # an import waits for no store, and needs the quiet to its end
        self._thread.join(patience)
        self._quiet.close()
        if not (self._delivery and self._delivery.is_complete):
            self._warn("did not take all in time")

    def _work(self) -> None:
        try:
            self._send()
        except Exception as error:
            # Python would say it by itself, and the secrets in it.
            self._warn(f"failed: {reason_of(error)}")
            logger.error("%s", redacted(traceback.format_exc()))

    def _send(self) -> None:
        while True:
            is_over = self._over.is_set()
            is_due = time.monotonic() >= self._retry_at
            # At the end a store that refuses at once is asked once more; one that hangs is not.
            if is_due or (is_over and self._last_took < QUICK_SECONDS):
                self._attempt()
            if is_over:
                return
            self._over.wait(SECONDS_PER_TICK)

    def _attempt(self) -> None:
        started = time.monotonic()
        try:
            if self._delivery is None:
                self._load()
                store = MlflowStore(self._uri)
                self._delivery = Delivery(store, self._ledger, self._metrics)
            self._delivery.deliver()
        except failures() as error:
            self._rest(error)
        finally:
            self._last_took = time.monotonic() - started

    def _load(self) -> None:
        try:
            load(self._uri)
        finally:
            self._is_loaded.set()

    def _rest(self, error: BaseException) -> None:
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._warn(f"failed: {reason_of(error)}")

    def _warn(self, what: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "MLflow at %s %s. The work goes on; %s keeps all metrics, and what is missing "
            "is sent later, or by `align mlflow-sync %s`.",
            address_of(self._uri),
            what,
            self._metrics,
            self._metrics.parent,
        )
