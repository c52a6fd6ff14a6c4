"""The record of a run: `run.json`, and in `sent.json` how much of it each tracker has.

The metrics are in metrics.jsonl. A training has these files in its own folder; any other run has
a folder in the outbox of the cache or sweep that it makes, until every tracker has all of it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...schemas.config import TrackingOptions
from ...schemas.errors import StorageError, UsageError, log_failure
from ...schemas.json_codec import CodecError, from_json, to_json
from ...schemas.safe_text import is_plain_path, redacted
from ..storage.disk import fs
from ..storage.disk.lines import line_start
from ..storage.disk.locks import try_owner_lock
from ..storage.output_folder import make_place
from ..storage.records import Records
from ..storage.run.run_folder import RunFolder
from .journal import read_entries

Status = Literal["FINISHED", "FAILED", "KILLED"]

OUTBOX = "_align/outbox"  # in the folder of a cache or sweep
COPIES = "_align/artifacts"  # of files from elsewhere that a run logs
OUTBOX_NAME = re.compile(r"[0-9]{13}-[0-9a-f]{8}")  # sorts by time
KEY = re.compile(r"[0-9a-f]{16}")  # of a run

# They name the experiment where the settings do not.
EXPERIMENT_VARIABLES = {"mlflow": "MLFLOW_EXPERIMENT_NAME", "wandb": "WANDB_PROJECT"}

KEY_TAG = "align.run_key"  # finds a run whose id the store never returned
PARENT_TAG = "align.parent"  # the key of the run that a run belongs to
REPLACES_TAG = "align.goes_on_from"  # the key of the run that was given up for this one
NUMBERS_TAG = "align.numbers_of"  # a digest of the settings that the numbers of a run depend on
GROUP_TAG = "align.sweep"  # the sweep's folder
ROUNDS_TAG = "align.rounds"  # likewise the folder of rounds
TRIAL_TAG = "align.trial"  # the name of a training in its sweep
ROUND_TAG = "align.round"  # the number of a round
SIGNS_TAG = "align.stands_out"  # the warnings about a training, or "nothing"


@dataclass(frozen=True)
class Dataset:
    """Data that went into a run."""

    name: str
    digest: str
    source: str
    context: str


@dataclass(frozen=True)
class RunFacts:
    """All that a tracker is sent of a run but its metrics."""

    key: str
    name: str
    experiment: str  # as the settings name it
    began_ms: int
    ended_ms: int = 0
    status: str = ""  # empty while it runs
    description: str = ""  # Markdown
    trackers: dict[str, str] = field(default_factory=dict)  # each with its address, no secrets
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: tuple[Dataset, ...] = ()
    files: dict[str, int] = field(default_factory=dict)  # path, and when it was logged
    models: dict[str, dict[str, str]] = field(default_factory=dict)  # path, and tags
    experiments: dict[str, str] = field(default_factory=dict)  # of trackers, by the environment

    def data(self) -> dict[str, str]:
        """Its data sets in words, by digest."""
        return {one.digest: f"{one.name}, {one.context}, {one.source}" for one in self.datasets}

    def experiment_in(self, tracker: str) -> str:
        """What the experiment is called in a tracker; the same from every shell."""
        return self.experiments.get(tracker, self.experiment)


@dataclass(frozen=True)
class Sent:
    """What one tracker has of a run; less than it has costs a repetition, which adds nothing."""

    run_id: str = ""  # in the store
    offset: int = 0  # into metrics.jsonl, in bytes
    files: dict[str, int] = field(default_factory=dict)
    status: str = ""  # set once it has everything


@dataclass(frozen=True)
class SentFile:
    """The content of sent.json; it is ignored if the run has another key."""

    key: str
    trackers: dict[str, Sent]


FACTS = Records(
    RunFacts,
    remedy=(
        "Remove it: trackers then do not get the rest of the run, and a training that resumes is "
        "recorded as a new run."
    ),
)


class RunRecord:
    """run.json and sent.json of a run; its owner writes both, a thread per tracker the second."""

    def __init__(self, folder: RunFolder, facts: RunFacts) -> None:
        self.folder = folder
        self.facts = facts
        self._lock = threading.Lock()
        self._sent: dict[str, Sent] = {}
        with suppress(FileNotFoundError, CodecError):  # lost: all is sent again
            kept = from_json(SentFile, folder.sent.read_bytes())
            if kept.key == facts.key:
                self._sent = kept.trackers

    @staticmethod
    def find(folder: RunFolder) -> RunRecord | None:
        """The record of a run, if it has one."""
        facts = FACTS.find(folder.run_record)
        if facts and not KEY.fullmatch(facts.key):  # a part of names of files that are removed
            raise FACTS.damaged(folder.run_record, f"key: {facts.key!r:.60} is not a key")
        return RunRecord(folder, facts) if facts else None

    @staticmethod
    def read(folder: RunFolder) -> RunRecord:
        """The record of a run, which another process may have sent and removed."""
        record = RunRecord.find(folder)
        if record is None:
            raise UsageError(
                f"{folder.root} has nothing left to send: {folder.run_record} is gone."
            )
        return record

    def change(self, **values: Any) -> None:
        """Replaces facts, durably."""
        facts = dataclasses.replace(self.facts, **values)
        if facts != self.facts or not self.folder.run_record.exists():
            FACTS.replace(self.folder.run_record, facts)
            self.facts = facts

    def sent(self, tracker: str) -> Sent:
        """What a tracker has."""
        return self._sent.get(tracker, Sent())

    def keep_sent(self, tracker: str, sent: Sent) -> None:
        """Notes durably what a tracker has."""
        with self._lock:
            if sent != self._sent.get(tracker):
                self._sent = {**self._sent, tracker: sent}
                kept = SentFile(self.facts.key, self._sent)
                fs.publish(self.folder.sent, to_json(kept).encode())

    def unsent_files(self, sent: Sent) -> Iterator[tuple[str, int]]:
        """The files of the run that a tracker does not have as they were last logged."""
        for name, logged in self.facts.files.items():
            if sent.files.get(name) != logged and self._is_own(name):
                yield name, logged

    def _is_own(self, name: str) -> bool:
        """Whether the run has this file or folder; a record from elsewhere may name any other."""
        root, path = self.folder.root.resolve(), self.folder.root / name
        if not is_plain_path(name) or not path.exists() or path.resolve() != root / name:
            return False
        return not any(one.is_symlink() for one in path.rglob("*"))

    def is_sent(self, tracker: str) -> bool:
        """Whether a tracker has all of a run that has ended."""
        sent = self.sent(tracker)
        if not self.facts.status or sent.status != self.facts.status:
            return False
        # A torn last line, or one that nobody can read, is never sent.
        metrics, start = self.folder.metrics, sent.offset
        if line_start(metrics, start) != start or [*read_entries(metrics, start)]:
            return False
        return not [*self.unsent_files(sent)]

    def send_to(self, addresses: Mapping[str, str]) -> None:
        """Adds trackers; one whose address changed has nothing there yet."""
        for tracker, address in addresses.items():
            if self.facts.trackers.get(tracker, address) != address:
                self.keep_sent(tracker, Sent())
        self.change(trackers={**self.facts.trackers, **addresses})

    def cut_back(self, size: int) -> None:
        """Follows metrics.jsonl after it was cut back to so many bytes."""
        for tracker, sent in self._sent.items():
            self.keep_sent(tracker, dataclasses.replace(sent, offset=min(sent.offset, size)))

    def replace_run(self, numbers: str, *, keeps_facts: bool) -> None:
        """Begins another run for trackers, since the numbers of this one would be other ones."""
        before = self.facts
        facts = before if keeps_facts else RunFacts("", before.name, before.experiment, now_ms())
        self.facts = dataclasses.replace(
            facts,
            key=secrets.token_hex(8),
            trackers=before.trackers,
            experiments=before.experiments,
            tags={**facts.tags, REPLACES_TAG: before.key, NUMBERS_TAG: numbers},
        )
        FACTS.replace(self.folder.run_record, self.facts)
        self._sent = {}  # sent.json has the key before

    def log_file(self, path: Path) -> None:
        """Adds a file or folder of the run, or marks it as changed."""
        name = path.relative_to(self.folder.root.absolute()).as_posix()
        self.change(files={**self.facts.files, name: time.time_ns()})


def new_facts(options: TrackingOptions, name: str) -> RunFacts:
    """The facts of a run that begins, under this name or that of the settings."""
    called, experiment = redacted(options.run_name or name), redacted(options.experiment)
    named = {}
    if options.experiment == TrackingOptions().experiment:
        named = {name: os.environ.get(one, "") for name, one in EXPERIMENT_VARIABLES.items()}
    experiments = {name: redacted(one) for name, one in named.items() if one}
    key = secrets.token_hex(8)
    return RunFacts(key, called, experiment, began_ms=now_ms(), experiments=experiments)


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def new_outbox_folder(home: Path) -> RunFolder:
    """Makes the folder of a run in the outbox of a cache or sweep."""
    folder = RunFolder(home / OUTBOX / f"{now_ms():013d}-{secrets.token_hex(4)}")
    for tries_left in (2, 1, 0):
        try:
            make_place(folder.root, folder.private)
            break
        except StorageError:  # another process may have removed the outbox, which was empty
            if not tries_left:
                raise
    return folder


def unsent_runs(home: Path) -> list[RunFolder]:
    """The runs in an outbox, the oldest first; another process may own them."""
    return [folder for folder in _outbox_folders(home) if folder.run_record.exists()]


def remove_remnants(home: Path) -> None:
    """Removes folders that a kill left without a record; a process may be about to write one."""
    for folder in _outbox_folders(home):
        if not folder.run_record.exists():
            with log_failure("What an earlier run left in the outbox stays"), ExitStack() as stack:
                is_made = folder.private.is_dir()
                if not is_made or stack.enter_context(try_owner_lock(folder.root, "outbox")):
                    fs.remove_tree(folder.root)


def remove_sent(records: Sequence[RunRecord], *, is_alone: bool) -> None:
    """Removes runs from their outbox that all trackers have; no lock in them may be held.

    A process that is alone in the folder of the outbox removes that as well once it is empty.
    """
    for record in records:
        with log_failure("A run that was sent whole stays in the outbox"):
            if all(map(record.is_sent, record.facts.trackers)):
                fs.unlink(record.folder.run_record)
                fs.fsync(record.folder.private)
                fs.remove_tree(record.folder.root)
                if is_alone:
                    with suppress(OSError):  # it holds the run of another process
                        record.folder.root.parent.rmdir()


def _outbox_folders(home: Path) -> list[RunFolder]:
    outbox = home / OUTBOX
    found = outbox.iterdir() if outbox.is_dir() else ()
    return [RunFolder(path) for path in sorted(found) if OUTBOX_NAME.fullmatch(path.name)]
