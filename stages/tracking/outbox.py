"""What has to be sent to MLflow, kept until it is; a failure costs a warning, never a run.

That is `_align/mlflow.json` of a run. A run that is not a training has its folder in the outbox of
the cache or sweep that it makes, as long as MLflow was not sent all of it.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...schemas.errors import CorruptionError, StorageError, UsageError, log_failure
from ...schemas.json_codec import CodecError, from_signed_json, to_signed_json
from ...schemas.safe_text import bare_address, hear, masked_address, redacted, shown
from ..storage import fs
from ..storage.cache_folder import CacheFolder, make_place
from ..storage.locks import try_owner_lock
from ..storage.run_folder import RunFolder
from .journal import MlflowRecord
from .mlflow_client import GOES_ON_TAG, sqlite_file

FORMAT_VERSION = 1
KEY = re.compile(r"[0-9a-f]{16}")
RECORD_NAME = re.compile(r"[0-9]{13}-[0-9a-f]{8}")  # sorts by time


class Ledger:
    """The record in memory and on disk, for the thread that works and the one that sends."""

    def __init__(self, path: Path, record: MlflowRecord) -> None:
        self._path = path
        self._lock = threading.RLock()
        self.changes: Counter[str] = Counter()  # of files, as far as this process said so
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

    def renew_artifact(self, name: str) -> None:
        """A file is new or has changed: it has to be sent, again if need be."""
        with self._lock:
            self.changes[name] += 1
            self.add("artifacts", {name: False})

    def artifact_sent(self, name: str, changes: int) -> None:
        """A file was sent as it was after so many changes, durably."""
        with self._lock:
            if self.changes[name] == changes:
                self.add("artifacts", {name: True})

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
        began_ms=now_ms(),
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
            f"{path.parent.parent} holds no run that was recorded in MLflow and not sent whole: it "
            f"has no {path.parent.name}/{path.name}, and no run in {path.parent.name}/outbox. Name "
            "the --output of `align train`, of a sweep, or a cache."
        )
    try:
        record = from_signed_json(MlflowRecord, fs.read_bytes(path))
        if not KEY.fullmatch(record.key):  # it is part of a query to the store
            raise CodecError(f"key {record.key!r:.40} is not sixteen hexadecimal digits")
        return Ledger(path, record)
    except CodecError as error:
        raise CorruptionError(
            f"{path} is damaged: {error}. Remove it: MLflow then does not get the rest of the run, "
            "and a training that continues is recorded as a new run."
        ) from error


def new_record(home: Path, *, is_alone: bool = True) -> RunFolder:
    """Makes the folder of a run in the outbox of a cache or sweep.

    Who is alone there also removes what is left of runs that were sent.
    """
    for folder in _records(home) if is_alone else []:
        with log_failure("What an earlier run left in the outbox stays"):
            _remove_remnant(folder)
    name = f"{now_ms():013d}-{secrets.token_hex(4)}"
    folder = RunFolder(CacheFolder(home).outbox / name)
    make_place(folder.root, folder.private)
    return folder


def close_record(folder: RunFolder) -> None:
    """Marks a run of an outbox as sent; its owner calls it, and what is left is never sent."""
    fs.unlink(folder.mlflow)
    fs.fsync_folder(folder.private)


def remove_if_sent(folder: RunFolder, *, is_alone: bool = True) -> None:
    """Removes a run from its outbox once it is closed; no lock in it may be held, because of NFS.

    A failure is logged: the next run on the cache or sweep tries again.
    """
    with log_failure("A run that MLflow was sent stays in the outbox"):
        if not folder.mlflow.exists():
            fs.remove_tree(folder.root)
            if is_alone:  # else another process may be about to use it
                fs.remove_folder(folder.root.parent)


def _remove_remnant(folder: RunFolder) -> None:
    """Removes a folder of an outbox that a kill has left without its record."""
    if folder.mlflow.exists():
        return
    if folder.private.is_dir():
        lock = try_owner_lock(folder, "outbox")
        if lock is None:
            return
        lock.release()
    fs.remove_tree(folder.root)


def unsent_runs(home: Path) -> list[RunFolder]:
    """The runs in an outbox, the oldest first; another process may own them."""
    return [folder for folder in _records(home) if folder.mlflow.exists()]


def _records(home: Path) -> list[RunFolder]:
    outbox = CacheFolder(home).outbox
    if outbox.is_symlink() or not outbox.is_dir():
        return []
    found = [
        RunFolder(path) for path in sorted(outbox.iterdir()) if RECORD_NAME.fullmatch(path.name)
    ]
    return [one for one in found if not (one.root.is_symlink() or one.private.is_symlink())]


def now_ms() -> int:
    """Milliseconds since 1970, as MLflow counts."""
    return time.time_ns() // 1_000_000


def plain_uri(uri: str) -> str:
    """The address without secrets, and the same from every folder."""
    if path := sqlite_file(uri):
        return f"sqlite:///{path.absolute()}"
    return bare_address(uri) if "://" in uri else str(Path(uri).absolute())


MAX_REASON = 200


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
    # OSError covers requests too, ValueError a malformed address or answer.
    return (OSError, ValueError, ImportError, sqlite3.Error, StorageError, *loaded)


def reason_of(error: BaseException) -> str:
    """What a store said, in one line and without secrets."""
    said = redacted(str(error).strip()) or type(error).__name__
    if isinstance(error, StorageError):  # our own: all of it is useful
        return said.rstrip(".")
    return shown(said.partition("\n")[0])[:MAX_REASON].rstrip(".")
