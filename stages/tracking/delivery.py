"""Brings a store up to what a run's ledger and journal say; doing it twice is doing it once."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from ...schemas.safe_text import redacted
from ..storage.disk.lines import line_start
from .journal import read_entries
from .outbox import Ledger, address_of, reason_of
from .tracker import RunRecord, Tracker

logger = logging.getLogger("align")

POINTS_PER_CALL = 1000
SECONDS_PER_MARK = 10.0
PRIVATE = "_align/"  # a file that was copied there is not part of the run


class Delivery:
    """Delivery of one run to one store; nothing known to have arrived is sent again."""

    def __init__(self, tracker: Tracker, ledger: Ledger, metrics: Path) -> None:
        self._tracker = tracker
        self._ledger = ledger
        self._metrics = metrics
        self._run_id = ""
        self._labels: tuple[object, ...] = ()
        self._status = ""
        self._sent = 0
        self._marked_at = time.monotonic()
        self._refused: set[str] = set()
        self._is_closed = False
        self.points = 0  # sent by this delivery

    def deliver(self) -> None:
        """Sends what is missing; raises what the store raises, and continues there next time."""
        record = self._ledger.record  # with a status in it, nothing is added after this
        is_done = False
        try:
            self._begin()
            self._send_labels()
            self._send_metrics()
            self._send_status(record)
            self._send_artifacts()
            self._send_models()
            if self._is_sent() and not self._is_closed:
                self._ledger.kind.close(self._tracker)
                self._is_closed = True
            is_done = True
        finally:
            self._mark()
            if not is_done:
                self._run_id = ""  # what became of the run is asked for before the next try

    @property
    def is_complete(self) -> bool:
        """Whether the store knows all, and how the run ended."""
        return self._is_closed and self._is_sent()

    def _is_sent(self) -> bool:
        record = self._ledger.record
        is_told = bool(record.status) and self._status == record.status
        linked = all(link.model_id for link in record.models)
        return is_told and linked and not list(self._owed())

    def _begin(self) -> None:
        if self._run_id:
            return
        run_id = self._tracker.begin(self._ledger.record)
        if not run_id:
            self._ledger.forget_run()
            self._labels, self._status = (), ""
            run_id = self._tracker.begin(self._ledger.record)
        self._run_id = run_id
        self._ledger.change(run_id=run_id)
        self._sent = line_start(self._metrics, self._ledger.record.metrics_sent)

    def _send_labels(self) -> None:
        record = self._ledger.record
        labels = (record.params, record.tags, record.datasets)
        if labels != self._labels:
            self._tracker.label(record)
            self._labels = labels

    def _send_metrics(self) -> None:
        while entries := read_entries(self._metrics, self._sent, max_points=POINTS_PER_CALL):
            self.points += self._tracker.log(entries)
            self._sent = entries[-1].end

    def _send_status(self, record: RunRecord) -> None:
        if record.status and record.status != self._status:
            self._tracker.end(record.status, record.ended_ms)
            self._status = record.status

    def _send_artifacts(self) -> None:
        for name, path in list(self._owed()):
            changes = self._ledger.changes[name]
            self._tracker.artifact(path, under=_folder_of(name))
            self._ledger.artifact_sent(name, changes)

    def _owed(self) -> Iterator[tuple[str, Path]]:
        """Files the store does not have, without those that no longer exist."""
        root = self._metrics.parent
        for name, is_there in self._ledger.record.artifacts.items():
            if is_there or name in self._refused or not os.path.lexists(root / name):
                continue
            if is_own(root, name):
                yield name, root / name
            else:
                self._refused.add(name)
                logger.warning(
                    "%s is not sent to %s: it is, or leads, outside of the run %s.",
                    name,
                    self._ledger.kind.title,
                    root,
                )

    def _send_models(self) -> None:
        for link in self._ledger.record.models:
            if not link.model_id:
                self._ledger.model_sent(link, self._tracker.model(link))

    def _mark(self) -> None:
        """Notes how far the journal is known to have arrived; an older note only costs a query."""
        is_due = time.monotonic() - self._marked_at >= SECONDS_PER_MARK
        if self._run_id and (is_due or self._ledger.record.status):
            self._marked_at = time.monotonic()
            self._ledger.change(metrics_sent=self._sent)


def is_own(root: Path, name: str) -> bool:
    """Whether a name is that of a file or folder in the run, with no link on the way or in it."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        return False
    path = root
    for part in parts:
        path /= part
        if path.is_symlink():
            return False
    walked = (Path(top, one) for top, dirs, files in os.walk(path) for one in [*dirs, *files])
    modes = (one.lstat().st_mode for one in (path, *walked))
    return all(stat.S_ISREG(mode) or stat.S_ISDIR(mode) for mode in modes)


def _folder_of(name: str) -> str:
    """The folder of a file in the store: as in the run, and copies at the top."""
    folder = str(Path(name).parent)
    return "" if folder == "." or name.startswith(PRIVATE) else folder


SECONDS_PER_TICK = 1.0
RETRY_SECONDS = 60.0
QUICK_SECONDS = 1.0
# To import a library takes seconds of the interpreter; the first step of a training goes before.
FIRST_STEP_SECONDS = 10.0


class Sender:
    """Sends one tracker what is new every second; after a failure it is left alone for a minute.

    It begins when it is asked to, or after `FIRST_STEP_SECONDS`.
    """

    def __init__(self, address: str, ledger: Ledger, metrics: Path, home: Path) -> None:
        self._address = address
        self.ledger = ledger
        self._metrics = metrics
        self._home = home
        self._delivery: Delivery | None = None
        self._may_begin = threading.Event()
        self._was_asked = threading.Event()
        self._over = threading.Event()
        self._is_loaded = threading.Event()
        self._retry_at = 0.0
        self._last_took = 0.0
        self._has_warned = False
        self._thread = threading.Thread(target=self._work, name=ledger.kind.name, daemon=True)
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        """Whether the store knows all of the run, and how it ended."""
        is_at_work = self._thread.is_alive()
        return not is_at_work and self._delivery is not None and self._delivery.is_complete

    def begin(self) -> None:
        """Sends from now on."""
        self._may_begin.set()

    def wait_for_answer(self, patience: float) -> None:
        """Waits until the store made the run or failed, no longer than so many seconds."""
        self._was_asked.wait(patience)

    def end(self) -> None:
        """Sends the rest."""
        self._over.set()
        self.begin()

    def wait_for_library(self) -> None:
        """Waits for an import, which waits for no store, and needs the quiet to its end."""
        self._is_loaded.wait()

    def join(self, patience: float) -> None:
        """Waits so many seconds for the rest to be sent; what is not stays in the ledger."""
        self._thread.join(patience)
        if not self.is_complete:
            self._warn("did not take all in time")

    def _work(self) -> None:
        self._may_begin.wait(FIRST_STEP_SECONDS)
        try:
            self._send()
        except Exception as error:
            # Python would say it by itself, and the secrets in it.
            self._warn(f"failed: {reason_of(error)}")
            logger.error("%s", redacted(traceback.format_exc()))
        finally:
            self._was_asked.set()

    def _send(self) -> None:
        while True:
            is_over = self._over.is_set()
            is_due = time.monotonic() >= self._retry_at
            # At the end a store that refuses at once is asked again; one that hangs is not.
            if is_due or (is_over and self._last_took < QUICK_SECONDS):
                self._attempt()
            if is_over:
                return
            self._over.wait(SECONDS_PER_TICK)

    def _attempt(self) -> None:
        started = time.monotonic()
        kind = self.ledger.kind
        try:
            if self._delivery is None:
                self._load()
                self._delivery = Delivery(kind.open(self._address), self.ledger, self._metrics)
            self._delivery.deliver()
        except Exception as error:
            if not kind.is_failure(error):
                raise
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._warn(f"failed: {reason_of(error)}")
        finally:
            self._last_took = time.monotonic() - started
            self._was_asked.set()

    def _load(self) -> None:
        try:
            self.ledger.kind.load(self._address)
        finally:
            self._is_loaded.set()

    def _warn(self, what: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%s at %s %s. The work continues; %s keeps all metrics, and what is missing "
            "is sent later, or by `align mlflow-sync %s`.",
            self.ledger.kind.title,
            address_of(self._address),
            what,
            self._metrics,
            self._home,
        )


class Senders:
    """The senders of one run, of which none holds another up: they share the seconds to wait."""

    def __init__(
        self, ledgers: Sequence[Ledger], addresses: Mapping[str, str], metrics: Path, home: Path
    ) -> None:
        self._quiet = ExitStack()
        self._all: list[Sender] = []
        for ledger in ledgers:
            if address := addresses.get(ledger.kind.name):
                self._quiet.enter_context(ledger.kind.quiet())
                self._all.append(Sender(address, ledger, metrics, home))

    def begin(self) -> None:
        """Sends from now on."""
        for sender in self._all:
            sender.begin()

    def wait_for_answers(self, patience: float) -> None:
        """Waits until each store made the run or failed, no longer than so many seconds."""
        self.begin()
        deadline = time.monotonic() + patience
        for sender in self._all:
            sender.wait_for_answer(deadline - time.monotonic())

    def finish(self, patience: float) -> None:
        """Waits so many seconds for the rest to be sent; what is not stays in the ledgers."""
        for sender in self._all:
            sender.end()
        with self._quiet:
            for sender in self._all:
                sender.wait_for_library()
            deadline = time.monotonic() + patience
            for sender in self._all:
                sender.join(max(0.0, deadline - time.monotonic()))

    @property
    def complete(self) -> list[Ledger]:
        """The ledgers of the stores that know all of the run, and how it ended."""
        return [sender.ledger for sender in self._all if sender.is_complete]
