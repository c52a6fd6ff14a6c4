"""What has to be sent to MLflow, kept until it is; a failure costs a warning, never a run.

That is `_align/mlflow.json` of a run, and the note that names a run until MLflow knows its end: a
process that was killed ends nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...schemas.errors import CorruptionError, StorageError, UsageError
from ...schemas.json_codec import CodecError, from_json, from_signed_json, to_json, to_signed_json
from ...schemas.safe_text import bare_address, hear, masked_address, redacted, shown
from ..storage import fs
from .journal import MlflowRecord, UnendedRun
from .mlflow_client import GOES_ON_TAG, MlflowStore, sqlite_file
from .mlflow_silence import mlflow_silenced

logger = logging.getLogger("align")

FORMAT_VERSION = 1
KEY = re.compile(r"[0-9a-f]{16}")


class Ledger:
    """The record in memory and on disk, for the thread that works and the one that sends."""

    def __init__(self, path: Path, record: MlflowRecord) -> None:
        self._path = path
        self._lock = threading.RLock()
        self.record = record

    def change(self, **values: Any) -> None:
        """Replaces fields, durably."""
        with self._lock:
            changed = dataclasses.replace(self.record, **values)
            if changed != self.record:
                self.record = changed
                self.store()

    def add(self, field: str, values: Mapping[str, Any]) -> None:
        """Merges into a field that is a mapping, durably."""
        with self._lock:
            self.change(**{field: {**getattr(self.record, field), **values}})

    def append(self, field: str, value: Any) -> None:
        """Adds to a field that is a sequence, unless the value is in it, durably."""
        with self._lock:
            values = getattr(self.record, field)
            if value not in values:
                self.change(**{field: (*values, value)})

    def forget_run(self) -> None:
        """Starts over: the store has no such run."""
        with self._lock:
            models = (dataclasses.replace(link, model_id="") for link in self.record.models)
            self.change(
                run_id="",
                artifacts=dict.fromkeys(self.record.artifacts, False),
                models=tuple(models),
                metrics_sent=0,
            )

    def begin_again(self) -> None:
        """The store may have numbers of a future that was given up: the rest is another run's."""
        with self._lock:
            before = self.record.run_id
            origin = {GOES_ON_TAG: before} if before else {}
            self.forget_run()
            self.change(key=secrets.token_hex(8), tags={**self.record.tags, **origin})

    def move_to(self, uri: str) -> None:
        """Switches to another store."""
        with self._lock:
            if plain_uri(uri) != self.record.uri:
                self.forget_run()
                self.change(uri=plain_uri(uri))

    def store(self) -> None:
        """Writes the record as it is."""
        fs.publish(self._path, to_signed_json(self.record).encode(), label="mlflow")


def open_ledger(path: Path, *, uri: str, experiment: str, run_name: str) -> Ledger:
    """Goes on with the record of an earlier process, or begins one; no uri is the one it had."""
    if path.exists():
        ledger = load_ledger(path)
        if uri:
            ledger.move_to(uri)
        ledger.change(status="", ended_ms=0)
        return ledger
    record = MlflowRecord(
        format_version=FORMAT_VERSION,
        uri=plain_uri(uri),
        experiment=experiment,
        run_name=run_name,
        key=secrets.token_hex(8),
        run_id="",
        began_ms=time.time_ns() // 1_000_000,
        ended_ms=0,
        status="",
        tags={},
        params={},
        datasets=(),
        artifacts={},
        models=(),
        metrics_sent=0,
    )
    ledger = Ledger(path, record)
    ledger.store()
    return ledger


def load_ledger(path: Path) -> Ledger:
    """What has to be sent to MLflow about a run."""
    if not path.exists():
        raise UsageError(
            f"{path.parent.parent} holds no run that was recorded in MLflow: it has no "
            f"{path.parent.name}/{path.name}. Name the --output of `align train`."
        )
    try:
        record = from_signed_json(MlflowRecord, fs.read_bytes(path))
        if not KEY.fullmatch(record.key):  # it stands in a question to the store
            raise CodecError(f"key {record.key!r:.40} is not sixteen hexadecimal digits")
        return Ledger(path, record)
    except CodecError as error:
        raise CorruptionError(
            f"{path} is damaged: {error}. Remove it: the run is then recorded as a new one."
        ) from error


def plain_uri(uri: str) -> str:
    """The address without secrets, and the same from every folder."""
    if path := sqlite_file(uri):
        return f"sqlite:///{path.absolute()}"
    return bare_address(uri) if "://" in uri else str(Path(uri).absolute())


class Note:
    """One file; only the owner of the folder that holds it reads or changes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, uri: str, experiment: str) -> str:
        """Names a run before there is one; returns the key by which it is to be found."""
        run = UnendedRun(plain_uri(uri), experiment, secrets.token_hex(8), "", 0)
        self._store(run)
        return run.key

    def end(self, status: str) -> None:
        """Notes how the run ended, for whoever sends it to the store."""
        if run := self.read():
            self._store(dataclasses.replace(run, status=status, ended_ms=_now()))

    def remove(self) -> None:
        """The store knows the end."""
        fs.unlink(self._path)

    def read(self) -> UnendedRun | None:
        """The run that is named, if one is."""
        if not self._path.exists():
            return None
        try:
            run = from_json(UnendedRun, fs.read_bytes(self._path))
            if not KEY.fullmatch(run.key):  # it stands in a question to the store
                raise CodecError(f"key {run.key!r:.40} is not sixteen hexadecimal digits")
        except CodecError as error:
            raise CorruptionError(
                f"{self._path} is damaged: {error}. Remove it: MLflow then does not learn how "
                "that run ended."
            ) from error
        return run

    def settle(self, store: MlflowStore, uri: str) -> str:
        """Sends a store how the named run ended; returns its id, empty for none.

        Nobody is at work at it: where nobody said how it ended, it was killed.
        """
        try:
            run = self.read()
        except CorruptionError as error:
            logger.warning("%s", error)
            return ""
        if run is None:
            return ""
        if run.uri != plain_uri(uri):
            logger.warning(
                "%s names a run in another store, %s, which does not learn how it ended.",
                self._path,
                address_of(run.uri),
            )
            return ""
        if run_id := store.run_of_key(run.experiment, run.key):
            store.end_if_running(run_id, run.status or "KILLED", ended_ms=run.ended_ms or _now())
        self.remove()
        return run_id

    def _store(self, run: UnendedRun) -> None:
        fs.publish(self._path, to_json(run).encode(), label="mlflow")


def _now() -> int:
    return time.time_ns() // 1_000_000


PATIENCE_SECONDS = 60.0
MAX_REASON = 200


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
            with mlflow_silenced():
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
        """Whether the store has held up the work too long to be sent every number."""
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
