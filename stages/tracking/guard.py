"""The one door to the tracking store: its failures cost a warning, never a run."""

from __future__ import annotations

import logging
import sqlite3
import sys
import time
import warnings
from typing import TYPE_CHECKING

from ...schemas.errors import StorageError
from ...schemas.safe_text import hear, masked_address, redacted, shown
from .quiet import hushed

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_SECONDS = 60.0
MAX_REASON = 200

logger = logging.getLogger("align")


class Guard:
    """Calls the store until it fails for the first time."""

    def __init__(self, uri: str) -> None:
        self._uri = address_of(uri)
        self._is_open = True
        self._is_patient = True
        self._seconds = 0.0

    def call(self, action: Callable[[], object]) -> bool:
        """Does it, unless the store has failed before or the run is over; whether it was done."""
        if not self._is_open:
            return False
        started = time.monotonic()
        try:
            with hushed():
                warnings.simplefilter("ignore")
                action()
        except failures() as error:
            self._is_open = False
            logger.warning(
                "MLflow at %s failed: %s. From here on nothing is recorded there; "
                "the work goes on.",
                self._uri,
                reason_of(error),
            )
        else:
            return True
        finally:
            self._seconds += time.monotonic() - started
        return False

    def is_out_of_patience(self) -> bool:
        """Whether the store has held up the work too long to be told every number."""
        if self._is_open and self._is_patient and self._seconds > PATIENCE_SECONDS:
            self._is_patient = False
            logger.warning(
                "MLflow at %s is slow: the work waited %.0f s for it. No more metrics are sent.",
                self._uri,
                self._seconds,
            )
        return not self._is_patient

    def close(self) -> None:
        """Makes every later call do nothing."""
        self._is_open = False


def address_of(uri: str) -> str:
    """A store's address as it may be said; its secrets are masked from now on wherever they are."""
    hear(uri)
    return masked_address(uri) if "://" in uri else uri


def failures() -> tuple[type[BaseException], ...]:
    """What a store raises; a library that was never imported cannot have raised anything."""
    named = (
        ("mlflow.exceptions", "MlflowException"),
        ("sqlalchemy.exc", "SQLAlchemyError"),
        ("alembic.util.exc", "CommandError"),
        ("urllib3.exceptions", "HTTPError"),
    )
    loaded = [getattr(sys.modules[module], name) for module, name in named if module in sys.modules]
    # OSError stands for requests too, ValueError for a malformed address or answer.
    return (OSError, ValueError, ImportError, sqlite3.Error, StorageError, *loaded)


def reason_of(error: BaseException) -> str:
    """What a store said, in one line and without secrets."""
    said = redacted(str(error).strip()) or type(error).__name__
    if isinstance(error, StorageError):  # of ours: all of it is of use
        return said.rstrip(".")
    return shown(said.partition("\n")[0])[:MAX_REASON].rstrip(".")
