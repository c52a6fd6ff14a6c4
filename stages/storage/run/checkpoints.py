"""Saves, restores and prunes checkpoints: all files are durable before one rename commits them.

Every rank writes into one draft folder and reports the length and digest of its files; rank 0
compares the folder with the reports, adds the record, and gives the folder its name.

A run resumes from the checkpoint that `latest` names if it is whole, else from the newest whole
one. One rank chooses for all: ranks that looked for themselves could find different ones. The
newest few are kept, the best, and always the one that `latest` names.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .... import __version__
from ....schemas.checkpoint import (
    BestSoFar,
    Checkpoint,
    CheckpointFile,
    Chosen,
    Later,
    Peers,
    Position,
    RankFiles,
    Retention,
    Saved,
)
from ....schemas.errors import AlignError, CorruptionError, StorageError
from ....schemas.json_codec import to_signed_json
from ..disk import fs
from ..disk.failpoints import reach
from ..signed_records import SignedRecords
from .run_folder import RECORD_NAME, RunFolder, described, trash_name

logger = logging.getLogger("align")


def save_checkpoint(
    folder: RunFolder,
    record: Checkpoint,
    write: Callable[[Path], Iterable[str]],
    *,
    run_id: str,
    peers: Peers,
    retention: Retention,
) -> Saved:
    """Saves a checkpoint together with all other ranks; if one of them fails, there is none.

    `record` has no files yet. `write` fills the folder it is given and returns the relative paths
    of this rank's own files.
    """
    step = record.position.global_step
    draft = folder.draft(step, run_id)
    shares = peers.gather(_write_share(draft, write))
    failure = _finish(folder, draft, record, shares, retention) if peers.rank == 0 else ""
    return Saved(step, peers.gather(failure)[0])


def _write_share(draft: Path, write: Callable[[Path], Iterable[str]]) -> RankFiles:
    """Writes this rank's files; returns an OSError, because the other ranks wait for this one."""
    try:
        fs.make_folder(draft)
        names = sorted(write(draft))
        reach("checkpoint.written")
        for name in names:
            fs.fsync(draft / name)
        return RankFiles(tuple(described(draft, draft / name) for name in names))
    except (AlignError, OSError, RuntimeError) as error:  # a full disk is torch's RuntimeError
        said = str(error).partition("\n")[0]
        return RankFiles((), said or type(error).__name__)


def _finish(
    folder: RunFolder,
    draft: Path,
    record: Checkpoint,
    shares: Sequence[RankFiles],
    retention: Retention,
) -> str:
    """Commits the checkpoint and prunes old ones; returns the failure, or nothing."""
    try:
        _require_all(draft, shares)
        _commit(folder, draft, record, shares)
        prune(folder, retention, newest=record.position.global_step)
    except StorageError as error:
        _abandon(folder, draft)
        return str(error)
    return ""


def _require_all(draft: Path, shares: Sequence[RankFiles]) -> None:
    failures = {rank: share.failure for rank, share in enumerate(shares) if share.failure}
    if failures:
        raise StorageError("; ".join(f"rank {rank}: {said}" for rank, said in failures.items()))
    vouched = [(file.path, file.bytes) for share in shares for file in share.files]
    found = [
        (path.relative_to(draft).as_posix(), path.stat().st_size)
        for path in draft.rglob("*")
        if not path.is_dir()
    ]
    if odd := sorted(set(vouched) ^ set(found)):
        raise StorageError(
            f"{draft} differs from what the ranks wrote: {odd[0][0]} ({odd[0][1]} bytes)."
        )
    if len(set(vouched)) < len(vouched):
        raise StorageError(f"{draft}: two ranks wrote the same file.")


def record_of(position: Position, best_so_far: BestSoFar | None = None) -> Checkpoint:
    """The record of a checkpoint that has no files yet."""
    known = dataclasses.replace(position, metrics=_finite(position.metrics))
    return Checkpoint(__version__, known, (), best_so_far)


def _commit(
    folder: RunFolder, draft: Path, record: Checkpoint, shares: Sequence[RankFiles]
) -> None:
    files = sorted((file for share in shares for file in share.files), key=lambda file: file.path)
    reach("checkpoint.before_json")
    write_record(draft, dataclasses.replace(record, files=tuple(files)))
    for path in (*(path for path in draft.rglob("*") if path.is_dir()), draft):
        fs.fsync_folder(path)
    final = folder.step(record.position.global_step)
    if final.exists():  # of a run that then resumed from an older checkpoint
        fs.rename(final, trash_name(final))
    reach("checkpoint.before_rename")
    fs.rename(draft, final)
    reach("checkpoint.after_rename")
    fs.fsync_folder(folder.checkpoints)
    fs.publish(folder.latest, f"{final.name}\n".encode(), label="latest")


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def write_record(draft: Path, checkpoint: Checkpoint) -> None:
    """Writes the record of a checkpoint into the draft of its folder."""
    fs.write_new(draft / RECORD_NAME, to_signed_json(checkpoint).encode())


def _abandon(folder: RunFolder, draft: Path) -> None:
    with suppress(StorageError):  # the next start removes it
        if draft.exists():
            fs.rename(draft, trash_name(draft))
        folder.empty_trash()


def choose_checkpoint(folder: RunFolder) -> Chosen | None:
    """The newest checkpoint that is whole; every byte is read, and damaged ones are renamed."""
    set_aside: list[str] = []
    for step in _in_order(folder):
        path = folder.step(step)
        try:
            return Chosen(verify_checkpoint(path), tuple(set_aside))
        except CorruptionError as error:
            bad = path.with_name(f".bad-{path.name}-{secrets.token_hex(4)}")
            fs.rename(path, bad)
            logger.warning("%s It is now called %s; an older one is tried.", error, bad.name)
            set_aside.append(bad.name)
    return None


def verify_checkpoint(path: Path) -> Checkpoint:
    """The record of a checkpoint; CorruptionError if one of its files is not whole."""
    checkpoint = read_checkpoint(path)
    for file in checkpoint.files:
        if fault := _fault_of(path, file):
            raise CHECKPOINTS.damaged(path, fault)
    return checkpoint


def read_checkpoint(path: Path) -> Checkpoint:
    """The record of a checkpoint, without a check of its files."""
    try:
        return CHECKPOINTS.read(path / RECORD_NAME)
    except StorageError as error:
        why = f"{RECORD_NAME} cannot be read: {error.__cause__}"
        raise CHECKPOINTS.damaged(path, why) from error


CHECKPOINTS = SignedRecords(Checkpoint, remedy="Without it a run resumes from an older one.")


def _in_order(folder: RunFolder) -> list[int]:
    steps = folder.steps()[::-1]
    named = folder.latest_step()
    if named in steps:
        return [named, *(step for step in steps if step != named)]
    if steps:
        logger.warning(
            "%s does not name a checkpoint that exists; the newest is tried.", folder.latest
        )
    return steps


def _fault_of(path: Path, expected: CheckpointFile) -> str:
    """Why a file of a checkpoint is not whole; empty if it is."""
    file = path / expected.path
    try:
        if (found := file.stat().st_size) != expected.bytes:
            return f"{expected.path} has {found} bytes, not {expected.bytes}"
        if fs.sha256_of(file) != expected.sha256:
            return f"{expected.path} is not what was written (sha256 differs)"
    except (OSError, StorageError) as error:
        return f"{expected.path} cannot be opened: {error.__cause__ or error}"
    return ""


# A metric with one of these between its slashes is best where it is lowest.
LOWEST = frozenset({"loss", "nll", "kl", "rejected", "grad_norm", "errors"})


@dataclass(frozen=True)
class WantedMetric:
    """The metric that makes a checkpoint the best."""

    metric: str
    is_lowest: bool


def wanted(best: str) -> WantedMetric:
    """Reads `eval/loss`; with a leading - the lowest value is the best, with + the highest."""
    metric = best.lstrip("+-")
    if metric != best:
        return WantedMetric(metric, best.startswith("-"))
    return WantedMetric(metric, not LOWEST.isdisjoint(metric.split("/")))


def prune(folder: RunFolder, retention: Retention, *, newest: int) -> None:
    """Removes checkpoints that are not kept, and any later than the newest."""
    reach("prune.started")
    kept = kept_steps(folder, retention, newest=newest)
    for step in folder.steps():
        if step not in kept:
            # Renamed first: a half-removed folder must not look like a checkpoint.
            fs.rename(folder.step(step), trash_name(folder.step(step)))
    folder.empty_trash()
    reach("prune.done")


def kept_steps(folder: RunFolder, retention: Retention, *, newest: int) -> set[int]:
    """The steps whose checkpoints stay."""
    past = [step for step in folder.steps() if step <= newest]
    named = folder.latest_step()
    kept = {*past[-retention.keep_last :], newest, *([] if named is None else [named])}
    if not retention.best:
        return kept
    metric = wanted(retention.best).metric
    values = {step: _value(folder, step, metric) for step in past}
    known = {step: value for step, value in values.items() if value is not None}
    return {*kept, *best_first(known, retention.best)[:1]}


def best_first(values: Mapping[int, float], best: str) -> list[int]:
    """Steps by their value, the best first, and of equals the earliest."""
    sign = 1.0 if wanted(best).is_lowest else -1.0
    return sorted(values, key=lambda step: (sign * values[step], step))


def _value(folder: RunFolder, step: int, metric: str) -> float | None:
    try:
        return read_checkpoint(folder.step(step)).position.metrics.get(metric)
    except (CorruptionError, StorageError):
        return None


def best_checkpoint(folder: RunFolder, best: str) -> Checkpoint | None:
    """The checkpoint with the best value, every byte of it read; None where none has a value.

    A damaged one is refused, whatever its value: it may have been the best.
    """
    metric = wanted(best).metric
    measured = {
        step: read_checkpoint(folder.step(step)).position.metrics for step in folder.steps()
    }
    values = {step: found[metric] for step, found in measured.items() if metric in found}
    return verify_checkpoint(folder.step(best_first(values, best)[0])) if values else None


def add_checkpoint_metrics(
    folder: RunFolder,
    step: int,
    later: Later,
    *,
    run_id: str,
    retention: Retention,
) -> None:
    """Adds what is measured later to the record of a checkpoint; one rank does this."""
    known = read_checkpoint(folder.step(step))
    every = {**known.position.metrics, **_finite(later.metrics)}
    position = dataclasses.replace(known.position, metrics=every, fitted=later.fitted)
    grown = dataclasses.replace(known, position=position, best_so_far=later.best_so_far)
    _replace(folder, grown, run_id)
    # A process that was killed may have left a `latest` that a power loss undoes.
    fs.fsync_folder(folder.checkpoints)
    prune(folder, retention, newest=step)


def _replace(folder: RunFolder, checkpoint: Checkpoint, run_id: str) -> None:
    step = checkpoint.position.global_step
    # Not in the checkpoint: a draft left there would be a file that the record does not name.
    draft = folder.draft(step, run_id)
    fs.make_folder(draft)
    write_record(draft, checkpoint)
    fs.rename(draft / RECORD_NAME, folder.step(step) / RECORD_NAME)
    # Not synced: a run that resumes from a checkpoint without its evaluation evaluates again.
    fs.remove_folder(draft)
