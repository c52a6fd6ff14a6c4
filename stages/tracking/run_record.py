"""The record of a run on disk: `run.json`, and `sent.json` with the data that trackers have.

The metrics are in metrics.jsonl. A training has these files in its own folder. Any other run has a
folder in the outbox of the cache or sweep that it writes, until every tracker has everything.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...schemas.errors import StorageError, log_failure
from ...schemas.json_codec import CodecError, from_json, to_json
from ..storage.disk import fs
from ..storage.disk.lines import Line
from ..storage.output_folder import make_place
from ..storage.records import Records
from ..storage.run.run_folder import RunFolder

Status = Literal["FINISHED", "FAILED", "KILLED"]

OUTBOX = "_align/outbox"  # in the folder of a cache or sweep
COPIES = "_align/artifacts"  # copies of logged files from outside the run's folder
OUTBOX_NAME = re.compile(r"[0-9]{13}-[0-9a-f]{8}")  # sorts by time

KEY_TAG = "align.run_key"  # finds a run whose id the store never returned
PARENT_TAG = "align.parent"  # the key of the parent run
REPLACES_TAG = "align.replaces"  # the key of the run that this one replaces
NUMBERS_TAG = "align.numbers_of"  # a digest of the settings that decide a run's metrics
GROUP_TAG = "align.sweep"  # the sweep's folder
ROUNDS_TAG = "align.rounds"  # the folder of the rounds
TRIAL_TAG = "align.trial"  # the name of a training in its sweep
ROUND_TAG = "align.round"  # the number of a round
WARNINGS_TAG = "align.warnings"  # the warnings of a training, or "nothing"


@dataclass(frozen=True)
class Store:
    """The store of a tracker."""

    address: str  # without secrets
    experiment: str = "align"


@dataclass(frozen=True)
class Dataset:
    """An input data set of a run."""

    name: str
    digest: str
    source: str
    context: str


@dataclass(frozen=True)
class RunFacts:
    """The content of run.json: everything that a tracker gets, except the metrics."""

    key: str = ""
    name: str = ""
    began_ms: int = 0
    ended_ms: int = 0
    status: str = ""  # empty while the run is active
    description: str = ""  # Markdown
    stores: dict[str, Store] = field(default_factory=dict)  # by tracker
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: tuple[Dataset, ...] = ()
    files: dict[str, int] = field(default_factory=dict)  # path -> time when it was logged, in ns
    models: dict[str, dict[str, str]] = field(default_factory=dict)  # path -> tags

    def data(self) -> dict[str, str]:
        """A text per data set, by digest."""
        return {one.digest: f"{one.name}, {one.context}, {one.source}" for one in self.datasets}


@dataclass(frozen=True)
class Sent:
    """The data of a run that one tracker has, or less: sending data twice changes nothing."""

    run_id: str = ""  # in the store
    offset: int = 0  # byte offset in metrics.jsonl
    files: dict[str, int] = field(default_factory=dict)
    status: str = ""  # set once the tracker has everything


@dataclass(frozen=True)
class SentFile:
    """The content of sent.json."""

    trackers: dict[str, Sent]


FACTS = Records(
    RunFacts,
    remedy=(
        "Remove it: trackers then miss the rest of the run, and a resumed training becomes a new "
        "run."
    ),
)


class RunRecord:
    """run.json, written by the run's owner, and sent.json, written by a thread per tracker."""

    def __init__(self, folder: RunFolder, facts: RunFacts, *, is_kept: bool = True) -> None:
        self.folder = folder
        self.facts = facts
        self._is_kept = is_kept  # whether anything is written to disk
        self._sent: dict[str, Sent] = {}
        self._is_released = False
        self._lock = threading.Lock()

    @staticmethod
    def new(folder: RunFolder, name: str) -> RunRecord:
        """The record of a new run; it is written at its first change."""
        fs.unlink(folder.sent)  # it may belong to an earlier record that was removed
        return RunRecord(folder, RunFacts(secrets.token_hex(8), name, now_ms()))

    @staticmethod
    def find(folder: RunFolder) -> RunRecord | None:
        """The record of a run, or None."""
        facts = FACTS.find(folder.run_record)
        if facts is None:
            return None
        record = RunRecord(folder, facts)
        with suppress(FileNotFoundError, CodecError):  # without it everything is sent again
            record._sent = from_json(SentFile, folder.sent.read_bytes()).trackers
        return record

    def change(self, **values: Any) -> None:
        """Replaces facts and writes them durably."""
        facts = dataclasses.replace(self.facts, **values)
        if self._is_kept and (facts != self.facts or not self.folder.run_record.exists()):
            FACTS.replace(self.folder.run_record, facts)
        self.facts = facts

    def sent(self, tracker: str) -> Sent:
        """The data that a tracker has."""
        return self._sent.get(tracker, Sent())

    def keep_sent(self, tracker: str, sent: Sent) -> None:
        """Records durably which data a tracker has."""
        with self._lock:
            if self._is_released:
                raise StorageError(f"{self.folder.root}: its command has ended")
            if sent != self._sent.get(tracker):
                self._sent = {**self._sent, tracker: sent}
                fs.publish(self.folder.sent, to_json(SentFile(self._sent)).encode())

    def release(self) -> None:
        """Ends all writes to sent.json, because another process may own the run from now on."""
        with self._lock:
            self._is_released = True

    def unsent_files(self, sent: Sent) -> list[tuple[str, int]]:
        """The files whose last logged version a tracker does not have."""
        return [
            (name, logged)
            for name, logged in self.facts.files.items()
            if sent.files.get(name) != logged and (self.folder.root / name).exists()
        ]

    def log_file(self, path: Path) -> None:
        """Adds a file or folder to the run, or marks it as changed."""
        name = path.relative_to(self.folder.root.absolute()).as_posix()
        self.change(files={**self.facts.files, name: time.time_ns()})

    def is_sent(self, tracker: str) -> bool:
        """Whether the run has ended and a tracker has all of it."""
        sent = self.sent(tracker)
        has_ended = bool(self.facts.status) and sent.status == self.facts.status
        return has_ended and not self.unsent_files(sent)

    def add_stores(self, stores: Mapping[str, Store]) -> None:
        """Adds trackers; a tracker with a new address has no data yet."""
        for tracker, store in stores.items():
            if self.facts.stores.get(tracker, store).address != store.address:
                self.keep_sent(tracker, Sent())
        self.change(stores={**self.facts.stores, **stores})

    def resume(self, kept: Sequence[Line]) -> None:
        """Marks the run as active again, with only these lines of metrics.jsonl.

        If a damaged line before them is dropped, offsets are void and all lines are sent again.
        """
        size = sum(len(line.text) for line in kept)
        is_prefix = not kept or kept[-1].end == size
        for tracker, sent in self._sent.items():
            offset = min(sent.offset, size) if is_prefix else 0
            self.keep_sent(tracker, dataclasses.replace(sent, offset=offset, status=""))
        self.change(status="", ended_ms=0)

    def replace_run(self, numbers: str, *, keeps_facts: bool) -> None:
        """Starts a new run in the trackers, because other settings change the metrics."""
        before, kept = self.facts, self.facts
        if not keeps_facts:
            kept = RunFacts(name=before.name, began_ms=now_ms(), stores=before.stores)
        fs.unlink(self.folder.sent)  # first, because it belongs to the replaced run
        self._sent = {}
        tags = {**kept.tags, REPLACES_TAG: before.key, NUMBERS_TAG: numbers}
        self.facts = dataclasses.replace(kept, key=secrets.token_hex(8), tags=tags)
        FACTS.replace(self.folder.run_record, self.facts)


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def new_outbox_folder(home: Path) -> RunFolder:
    """Creates the folder of a run in the outbox of a cache or sweep."""
    folder = RunFolder(home / OUTBOX / f"{now_ms():013d}-{secrets.token_hex(4)}")
    make_place(folder.root, folder.private)
    return folder


def outbox_folders(home: Path) -> list[RunFolder]:
    """The folders in an outbox, the oldest first, also those of killed processes."""
    found = home.glob(f"{OUTBOX}/*")
    return [RunFolder(path) for path in sorted(found) if OUTBOX_NAME.fullmatch(path.name)]


def unsent_runs(home: Path) -> list[RunFolder]:
    """The runs in an outbox, the oldest first; another process may own them."""
    return [folder for folder in outbox_folders(home) if folder.run_record.exists()]


def remove_sent(folder: RunFolder) -> None:
    """Removes a run from its outbox if all trackers have it; it must not be locked."""
    with log_failure("A run that was sent completely stays in the outbox"):
        record = RunRecord.find(folder)
        if record is None:  # a process was killed before it wrote one
            fs.remove_tree(folder.root)
        elif all(map(record.is_sent, record.facts.stores)):
            FACTS.drop(folder.run_record)
            fs.remove_tree(folder.root)


def remove_empty_outbox(home: Path) -> None:
    """Removes an empty outbox; only for a process that is alone in `home`."""
    with suppress(OSError):  # it does not exist, or has a run
        (home / OUTBOX).rmdir()
