"""`align mlflow-sync`: uploads pending data of runs to trackers; repeating it changes nothing.

The address comes from the user's settings or --uri, never from the folder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...schemas.config import TrackingOptions
from ...schemas.errors import AlignError, StorageError, UsageError, log_failure
from ...stages.storage.disk.locks import owner_lock
from ...stages.storage.output_folder import SCORES
from ...stages.storage.run.run_folder import RunFolder, read_ending
from ...stages.tracking.run import Sender, reason_of
from ...stages.tracking.run_record import (
    GROUP_TAG,
    ROUNDS_TAG,
    RunRecord,
    Store,
    now_ms,
    remove_sent,
    unsent_runs,
)
from ...stages.tracking.tracker import MAIN, TRACKERS, quiet, tracker_names, tracker_of
from ..options.settings import load_settings

logger = logging.getLogger("align")

STATUS = {"finished": "FINISHED", "failed": "FAILED", "time": "KILLED", "signal": "KILLED"}


@dataclass(frozen=True)
class Synced:
    """The run in the store, and the amount of data that was missing."""

    tracker: str
    uri: str
    run_id: str
    status: str
    numbers_sent: int


def own_options(config: Path | None) -> TrackingOptions:
    """The user's tracking options, from `config` or the align.yaml in this folder."""
    return load_settings({}, [], file=config).config.tracking


def sync_runs(root: Path, options: TrackingOptions, *, uri: str = "") -> list[Synced]:
    """Uploads the pending data of a training, or of all runs of a cache, scores, sweep or rounds.

    All runs are tried; the first failure is raised at the end, others are logged.
    """
    done: list[Synced] = []
    failed: list[AlignError] = []
    for folder, home in _runs_of(root):
        try:
            record = RunRecord.find(folder)
            # A folder in a sweep or in rounds need not belong to it.
            is_part = record and {GROUP_TAG, ROUNDS_TAG} & record.facts.tags.keys()
            if is_part or home in (root, root / SCORES):
                done += sync_run(folder, home, options, uri=uri)
        except AlignError as error:
            failed.append(error)
    _raise_first(failed)
    if not done:
        titles = " or ".join(tracker_of(name).title for name in TRACKERS)
        lacks = RunFolder(root).run_record.relative_to(root)
        raise UsageError(
            f"{root} holds no run with pending data for {titles}: it has no {lacks}, and no run in "
            f"{lacks.parent}/outbox. Name the --output of `align train`, of a sweep, or a cache."
        )
    return done


def _runs_of(root: Path) -> Iterator[tuple[RunFolder, Path]]:
    """The possible runs in a folder, each with its home folder; parents come first."""
    if RunFolder(root).run_record.exists():
        yield RunFolder(root), root
        return
    for home in (root, root / SCORES):
        yield from ((folder, home) for folder in unsent_runs(home))
    # The trainings of a sweep, and the runs of the steps of rounds.
    for home in sorted((*root.glob("*"), *root.glob("round-*/*"), *root.glob("held-out/*"))):
        for folder in (*unsent_runs(home), RunFolder(home)):
            if folder.run_record.exists() and home != root / SCORES:
                yield folder, home


def sync_run(
    folder: RunFolder, home: Path, options: TrackingOptions, *, uri: str = "", only: str = ""
) -> list[Synced]:
    """Uploads a run, in its own folder or in the outbox of `home`, to its trackers.

    All trackers are tried; the first failure is raised at the end, others are logged.
    """
    done: list[Synced] = []
    failed: list[AlignError] = []
    with owner_lock(folder.root, "mlflow-sync"):
        record = RunRecord.find(folder)
        if record is None:  # another process uploaded and removed it
            return []
        if not record.facts.status:  # no process owns it: it was killed, or ended before upload
            ending = read_ending(folder)
            status = STATUS[ending.ending] if ending else "KILLED"
            record.change(status=status, ended_ms=now_ms())
        for name in [only] if only else sorted(record.facts.stores):
            try:
                done.append(_send(record, name, home, options, uri if name == MAIN else ""))
            except AlignError as error:
                failed.append(error)
    _raise_first(failed)
    if folder.root != home:
        remove_sent(folder)
    return done


def _raise_first(failed: Sequence[AlignError]) -> None:
    for error in failed[1:]:
        logger.error("%s", error)
    if failed:
        raise failed[0]


def send_files(folder: RunFolder, files: Sequence[Path], options: TrackingOptions) -> None:
    """Adds files to a recorded run that ended, and uploads them; the caller owns the folder."""
    if record := RunRecord.find(folder):
        for file in files:
            record.log_file(file.absolute())
        for name in {*tracker_names(options)} & record.facts.stores.keys():
            with log_failure(f"{tracker_of(name).title} lacks a part of {folder.root}"):
                _send(record, name, folder.root, options, uri="")


def _send(record: RunRecord, name: str, home: Path, options: TrackingOptions, uri: str) -> Synced:
    """Uploads a run to the given store, or to the user's own if the record names the same one.

    Another store would get a second copy of the run.
    """
    tracker, known = tracker_of(name), record.facts.stores[name]
    address = uri or tracker.address_of(options, home)
    plain = tracker.plain_address(address) if address else "nowhere"
    if not uri and plain != known.address:
        advice = f"pass --uri {known.address}" if name == MAIN else "set that store there"
        raise UsageError(
            f"{home} belongs to the store {known.address}, but your own ({tracker.named_by}) is "
            f"{plain}. To send the run to the store of the folder, {advice}."
        )
    record.add_stores({name: Store(plain, known.experiment)})
    sender = Sender(name, address, record)
    with store_errors(sender):
        sender.send()
    run_id = record.sent(name).run_id
    return Synced(name, plain, run_id, record.facts.status, sender.numbers)


@contextmanager
def store_errors(sender: Sender) -> Iterator[None]:
    """Silences the library in the block, and turns its errors into a StorageError."""
    try:
        with quiet(sender.name):
            yield
    except Exception as error:  # libraries of trackers raise any type
        other = "name another store with --uri, then " if sender.name == MAIN else ""
        raise StorageError(
            f"{sender.place} failed: {reason_of(error)}. Start it, or {other}run the same command "
            "again."
        ) from error
