"""Which checkpoints stay: the newest few, the best one, and always the one `latest` names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schemas.errors import CorruptionError, FingerprintError, StorageError
from . import fs
from .failpoints import reach
from .restore import latest_step, read_checkpoint
from .run_folder import TRASH_NAME, trash_name

if TYPE_CHECKING:
    from ...schemas.checkpoint import Retention
    from .run_folder import RunFolder


# A metric with one of these between its slashes is best where it is lowest.
LOWEST = frozenset({"loss", "nll", "kl", "rejected", "grad_norm", "errors"})


@dataclass(frozen=True)
class Wanted:
    """What makes a checkpoint the best."""

    metric: str
    is_lowest: bool


def wanted(best: str) -> Wanted:
    """Reads `eval/loss`; with a leading - the lowest value is the best, with + the highest."""
    metric = best.lstrip("+-")
    if metric != best:
        return Wanted(metric, best.startswith("-"))
    return Wanted(metric, not LOWEST.isdisjoint(metric.split("/")))


def prune(folder: RunFolder, retention: Retention, *, newest: int) -> None:
    """Removes what is not kept, later steps than the newest included: they are another future."""
    reach("prune.started")
    kept = kept_steps(folder, retention, newest=newest)
    for step in folder.steps():
        if step not in kept:
            # Renamed first: a half-removed folder must not look like a checkpoint.
            fs.rename(folder.step(step), trash_name(folder.step(step)))
    empty_trash(folder)
    reach("prune.done")


def empty_trash(folder: RunFolder) -> None:
    """Removes for good what was renamed to be removed."""
    # First the renames: nothing is emptied whose old name may come back.
    fs.fsync_folder(folder.checkpoints)
    reach("prune.forgotten")
    for path in sorted(folder.checkpoints.iterdir()):
        if TRASH_NAME.fullmatch(path.name):
            fs.remove_tree(path)


def kept_steps(folder: RunFolder, retention: Retention, *, newest: int) -> set[int]:
    """The steps whose checkpoints stay."""
    past = [step for step in folder.steps() if step <= newest]
    kept = {*past[-retention.keep_last :], newest}
    named = latest_step(folder)
    if named is not None:
        kept.add(named)
    best = _best(folder, past, retention.best) if retention.best else None
    return kept if best is None else kept | {best}


def _best(folder: RunFolder, steps: list[int], best: str) -> int | None:
    """The earliest step with the best value; None where no checkpoint has one."""
    sought = wanted(best)
    metric, sign = sought.metric, 1.0 if sought.is_lowest else -1.0
    values = {step: value for step in steps if (value := _value(folder, step, metric)) is not None}
    return min(values, key=lambda step: (sign * values[step], step), default=None)


def _value(folder: RunFolder, step: int, metric: str) -> float | None:
    try:
        return read_checkpoint(folder.step(step)).position.metrics.get(metric)
    except (CorruptionError, FingerprintError, StorageError):
        return None
