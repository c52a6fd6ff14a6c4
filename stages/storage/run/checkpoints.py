"""Saves, finds and prunes checkpoints: all files are durable before one rename commits them.

Every rank writes into one draft folder and reports the length and digest of its files. Rank zero
compares the folder with the reports, adds the record, and renames the folder. A checkpoint counts
if its record exists and the sizes match. Before a run resumes from it, each rank verifies the
digests of its part of the files.

The newest few checkpoints, the best one and the one that `latest` names are kept.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....schemas.checkpoint import Checkpoint, CheckpointFile, State
from ....schemas.errors import AlignError, CorruptionError, StorageError
from ....schemas.json_codec import to_signed_json
from ..disk import fs
from ..records import Records
from .run_folder import RECORD_NAME, RunFolder, trash_name

logger = logging.getLogger("align")

CHECKPOINTS = Records(Checkpoint, remedy="Without it a run resumes from an older one.")


def save_checkpoint(
    folder: RunFolder,
    record: Checkpoint,
    write: Callable[[Path], Iterable[str]],
    *,
    run_id: str,
    rank: int,
    gather: Callable[[Any], Sequence[Any]],
) -> str:
    """Saves a checkpoint together with all other ranks; if one fails, none is saved.

    `record` has no files yet. `write` fills a folder and returns the relative paths of this rank's
    own files. `gather` returns the values of all ranks. Returns the reason of a failure, the same
    on every rank; empty if the checkpoint was saved.
    """
    step = record.state.step
    draft = folder.draft(step, run_id)
    try:
        fs.make_folder(draft)
        names = sorted(write(draft))
        for name in names:
            fs.fsync(draft / name)
        mine = [_described(draft, name) for name in names], ""
    except (AlignError, OSError, RuntimeError) as error:  # a full disk is torch's RuntimeError
        # Not raised: the other ranks wait for this one.
        mine = [], str(error).partition("\n")[0] or type(error).__name__
    reports = gather(mine)

    failure = ""
    if rank == 0:
        try:
            _commit(folder, draft, record, reports)
        except StorageError as error:
            failure = str(error)
            with suppress(StorageError):  # then the next start removes the draft
                if draft.exists():
                    fs.rename(draft, trash_name(draft))
                folder.empty_trash()
    return str(gather(failure)[0])


def _described(draft: Path, name: str) -> CheckpointFile:
    path = draft / name
    return CheckpointFile(name, path.stat().st_size, fs.sha256_of(path))


def _commit(
    folder: RunFolder,
    draft: Path,
    record: Checkpoint,
    reports: Sequence[tuple[list[CheckpointFile], str]],
) -> None:
    """Compares a draft with the ranks' reports, adds the record, and renames the draft."""
    if failed := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(reports) if why]:
        raise StorageError("; ".join(failed))
    files = sorted((file for made, _ in reports for file in made), key=lambda file: file.path)
    reported = [(file.path, file.bytes) for file in files]
    if len({*reported}) < len(reported):
        raise StorageError(f"{draft}: two ranks wrote the same file.")
    written = {
        (path.relative_to(draft).as_posix(), path.stat().st_size)
        for path in draft.rglob("*")
        if not path.is_dir()
    }
    if odd := sorted({*reported} ^ written):
        raise StorageError(f"{draft} differs from what the ranks wrote: {odd[0][0]}.")

    whole = dataclasses.replace(record, files=tuple(files))
    fs.write_new(draft / RECORD_NAME, to_signed_json(whole).encode())
    for path in (*(path for path in draft.rglob("*") if path.is_dir()), draft):
        fs.fsync(path)
    final = folder.step(record.state.step)
    if final.exists():  # left by a run that later resumed from an older checkpoint
        fs.rename(final, trash_name(final))
    fs.rename(draft, final)
    fs.fsync(folder.checkpoints)
    fs.publish(folder.latest, f"{final.name}\n".encode())


def replace_state(folder: RunFolder, state: State) -> None:
    """Adds an evaluation to the saved state of a checkpoint; one rank does this.

    The evaluation was interrupted before the checkpoint, and done when the run resumed.
    """
    path = folder.step(state.step)
    CHECKPOINTS.replace(path / RECORD_NAME, dataclasses.replace(read_checkpoint(path), state=state))


def read_checkpoint(path: Path) -> Checkpoint:
    """The record of a checkpoint; its files are not checked."""
    try:
        return CHECKPOINTS.read(path / RECORD_NAME)
    except StorageError as error:
        why = f"{RECORD_NAME} cannot be read: {error.__cause__}"
        raise CHECKPOINTS.damaged(path, why) from error


def whole_checkpoints(folder: RunFolder) -> Iterator[Checkpoint]:
    """The complete checkpoints by records and sizes: the one in `latest`, then the newest."""
    for step in _in_order(folder):
        path = folder.step(step)
        try:
            checkpoint = read_checkpoint(path)
            for file in checkpoint.files:
                found = path / file.path
                if not found.is_file() or found.stat().st_size != file.bytes:
                    raise CHECKPOINTS.damaged(path, f"{file.path} does not have {file.bytes} bytes")
        except CorruptionError as error:
            logger.warning("%s", error)
        else:
            yield checkpoint


def _in_order(folder: RunFolder) -> list[int]:
    steps = folder.steps()[::-1]
    named = folder.latest_step()
    if named in steps:
        return [named, *(step for step in steps if step != named)]
    if steps:
        logger.warning("%s names no checkpoint; the newest is tried.", folder.latest)
    return steps


def damage(path: Path, checkpoint: Checkpoint, rank: int = 0, ranks: int = 1) -> str:
    """The first damaged file in a rank's part of a checkpoint; empty if there is none."""
    by_size = sorted(checkpoint.files, key=lambda file: -file.bytes)
    for file in by_size[rank::ranks]:
        try:
            if fs.sha256_of(path / file.path) != file.sha256:
                return f"{file.path} has another sha256"
        except StorageError as error:
            return f"{file.path} cannot be read: {error.__cause__ or error}"
    return ""


# A metric with one of these between its slashes is best at its lowest value.
LOWEST = frozenset({"loss", "nll", "kl", "rejected", "grad_norm", "errors"})


@dataclass(frozen=True)
class BestMetric:
    """The metric that chooses the best checkpoint."""

    metric: str
    is_lowest: bool


def best_metric(best: str) -> BestMetric:
    """Parses train.best: after a leading - the lowest value is the best, after + the highest."""
    metric = best.lstrip("+-")
    if metric != best:
        return BestMetric(metric, best.startswith("-"))
    return BestMetric(metric, not LOWEST.isdisjoint(metric.split("/")))


def best_first(values: Mapping[int, float], best: str) -> list[int]:
    """Steps by value, the best first; among equals, the earliest first."""
    sign = 1.0 if best_metric(best).is_lowest else -1.0
    return sorted(values, key=lambda step: (sign * values[step], step))


def best_checkpoint(folder: RunFolder, best: str) -> Checkpoint | None:
    """The checkpoint with the best value; None if none has a value.

    A checkpoint with an unreadable record is an error: it may be the best.
    """
    metric = best_metric(best).metric
    records = {step: read_checkpoint(folder.step(step)) for step in folder.steps()}
    measured = {step: record.state.metrics for step, record in records.items()}
    values = {step: found[metric] for step, found in measured.items() if metric in found}
    return records[best_first(values, best)[0]] if values else None


def prune(folder: RunFolder, *, newest: int, keep_last: int, best: str) -> None:
    """Removes all checkpoints except the last few, the best, the newest and the one in `latest`."""
    past = [step for step in folder.steps() if step <= newest]
    kept = {*past[-keep_last:], newest, folder.latest_step()}
    if best:
        metric, known = best_metric(best).metric, dict[int, float]()
        for step in past:
            with suppress(CorruptionError):  # a damaged checkpoint has no known value
                metrics = read_checkpoint(folder.step(step)).state.metrics
                if metric in metrics:
                    known[step] = metrics[metric]
        kept |= {*best_first(known, best)[:1]}
    for step in folder.steps():
        if step not in kept:
            # Renamed first: a half-removed folder must not look like a checkpoint.
            fs.rename(folder.step(step), trash_name(folder.step(step)))
    folder.empty_trash()
