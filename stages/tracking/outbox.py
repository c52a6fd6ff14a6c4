"""Ledgers of unsent tracker data, kept until sent; a failure costs a warning, never a run.

Each tracker has a ledger in the folder of a run. A run that is not a training has its
folder in the outbox of the cache or sweep that it makes, as long as one was not sent all of it.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...schemas.errors import StorageError, UsageError, log_failure
from ...schemas.safe_text import mask_secrets_of, masked_address, redacted, shown
from ..storage.cache import Cache
from ..storage.disk import fs
from ..storage.disk.locks import try_owner_lock
from ..storage.output_folder import make_place
from ..storage.records import Records
from ..storage.run.run_folder import RunFolder
from .tracker import GOES_ON_TAG, MAIN, TRACKERS, ModelLink, RunRecord, TrackerKind, kind_of

FORMAT_VERSION = 1
RECORD_NAME = re.compile(r"[0-9]{13}-[0-9a-f]{8}")  # sorts by time


class Ledger:
    """A tracker's record in memory and on disk, for the thread that works and one that sends."""

    def __init__(self, kind: TrackerKind, path: Path, record: RunRecord) -> None:
        self.kind = kind
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

    def append(self, field: str, *values: Any) -> None:
        """Adds to a field that is a sequence what is not in it, durably."""
        with self._lock:
            known = getattr(self.record, field)
            self.change(**{field: (*known, *(one for one in values if one not in known))})

    def renew_artifact(self, name: str) -> None:
        """Marks a new or changed file as unsent."""
        with self._lock:
            self.changes[name] += 1
            self.add("artifacts", {name: False})

    def artifact_sent(self, name: str, changes: int) -> None:
        """Notes durably that a file was sent as of so many changes."""
        with self._lock:
            if self.changes[name] == changes:
                self.add("artifacts", {name: True})

    def link_model(self, link: ModelLink) -> None:
        """Adds a model; what was made anew at a path stands in the place of what was there."""
        with self._lock:
            known = {one.folder: one for one in self.record.models}
            if link.folder not in known or known[link.folder].tags != link.tags:
                self.change(models=(*({**known, link.folder: link}).values(),))

    def model_sent(self, link: ModelLink, model_id: str) -> None:
        """Notes durably what the store calls a model; others may be added meanwhile."""
        with self._lock:
            known = dataclasses.replace(link, model_id=model_id)
            others = self.record.models
            self.change(models=tuple(known if one == link else one for one in others))

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

    def cut_back(self, size: int, *, is_same: bool) -> None:
        """Continues after metrics.jsonl was cut back to so many bytes.

        MLflow takes no number back, and by the same settings the steps that are trained again have
        the same ones; by others they are of a new run. What other trackers show is made of the
        file, so it is made anew.
        """
        with self._lock:
            if self.kind.name == MAIN and is_same:
                self.change(metrics_sent=min(self.record.metrics_sent, size))
                return
            before = self.record.run_id
            origin = {GOES_ON_TAG: before} if before else {}
            self.forget_run()
            if not size:  # the new run has nothing of the earlier one, so it has its own settings
                self.change(params={}, tags={}, datasets=(), artifacts={}, models=())
            self.change(key=secrets.token_hex(8), tags={**self.record.tags, **origin})

    def move_to(self, address: str) -> None:
        """Switches to another store."""
        with self._lock:
            plain = self.kind.plain(address)
            if plain != self.record.uri:
                self.forget_run()
                self.change(uri=plain)

    def store(self) -> None:
        """Writes the record as it is."""
        _records_for(self.kind).replace(self._path, self.record)


def open_ledger(
    kind: TrackerKind, folder: RunFolder, *, address: str, experiment: str, run_name: str
) -> Ledger:
    """Continues the record of an earlier process, or begins one; without an address, there."""
    path = folder.ledger(kind.name)
    if path.exists():
        ledger = load_ledger(kind, folder)
        if address:
            ledger.move_to(address)
        ledger.change(status="", ended_ms=0)
        return ledger
    record = RunRecord(
        format_version=FORMAT_VERSION,
        uri=kind.plain(address),
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
    # Also where there is one: who made it may have died before its name was durable.
    fs.make_folder(path.parent)
    fs.fsync(path.parent.parent)
    ledger = Ledger(kind, path, record)
    ledger.store()
    return ledger


def load_ledger(kind: TrackerKind, folder: RunFolder) -> Ledger:
    """The ledger of a run for a tracker."""
    path = folder.ledger(kind.name)
    record = _records_for(kind).find(path)
    if record is None:
        raise UsageError(
            f"{folder.root} has nothing left for {kind.title}: another process has sent the run."
        )
    return Ledger(kind, path, record)


def _records_for(kind: TrackerKind) -> Records[RunRecord]:
    return Records(
        RunRecord,
        remedy=(
            f"Remove it: {kind.title} then does not get the rest of the run, and a training that "
            "continues is recorded as a new run."
        ),
    )


def kinds_in(folder: RunFolder) -> list[TrackerKind]:
    """The trackers that have a ledger in the folder of a run."""
    return [kind_of(name) for name in TRACKERS if folder.ledger(name).exists()]


def new_record(home: Path, *, is_alone: bool = True) -> RunFolder:
    """Makes the folder of a run in the outbox of a cache or sweep.

    Who is alone there also removes what is left of runs that were sent.
    """
    for folder in _records(home) if is_alone else []:
        with log_failure("What an earlier run left in the outbox stays"):
            _remove_remnant(folder)
    name = f"{now_ms():013d}-{secrets.token_hex(4)}"
    folder = RunFolder(Cache(home).outbox / name)
    make_place(folder.root, folder.private)
    return folder


def close_record(ledger: Ledger, folder: RunFolder) -> None:
    """Marks a run of an outbox as sent to a tracker; its owner calls it."""
    _records_for(ledger.kind).drop(folder.ledger(ledger.kind.name))


def remove_if_sent(folder: RunFolder, *, is_alone: bool = True) -> None:
    """Removes a run from its outbox once it is closed; no lock in it may be held, because of NFS.

    A failure is logged: the next run on the cache or sweep tries again.
    """
    with log_failure("A run that was sent whole stays in the outbox"):
        if not folder.ledgers():
            fs.remove_tree(folder.root)
            if is_alone:  # else another process may be about to use it
                with suppress(OSError):  # it holds the run of another process
                    folder.root.parent.rmdir()


def _remove_remnant(folder: RunFolder) -> None:
    """Removes a folder of an outbox that a kill has left without its record."""
    if folder.ledgers():
        return
    if folder.private.is_dir():
        with try_owner_lock(folder.root, "outbox") as is_owner:
            if not is_owner:
                return
    fs.remove_tree(folder.root)


def unsent_runs(home: Path) -> list[RunFolder]:
    """The runs in an outbox, the oldest first; another process may own them."""
    return [folder for folder in _records(home) if folder.ledgers()]


def _records(home: Path) -> list[RunFolder]:
    outbox = Cache(home).outbox
    if outbox.is_symlink() or not outbox.is_dir():
        return []
    found = [
        RunFolder(path) for path in sorted(outbox.iterdir()) if RECORD_NAME.fullmatch(path.name)
    ]
    return [one for one in found if not (one.root.is_symlink() or one.private.is_symlink())]


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


MAX_REASON = 200


def address_of(uri: str) -> str:
    """A store's address for messages; its secrets are masked from now on wherever they are."""
    mask_secrets_of(uri)
    return masked_address(uri) if "://" in uri else uri


def reason_of(error: BaseException) -> str:
    """A store's error, in one line and without secrets."""
    said = redacted(str(error).strip()) or type(error).__name__
    if isinstance(error, StorageError):  # our own: all of it is useful
        return said.rstrip(".")
    return shown(said.partition("\n")[0])[:MAX_REASON].rstrip(".")
