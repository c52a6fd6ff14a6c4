"""Patience: a training is over once its evaluations have stopped improving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ...schemas.checkpoint import BestSoFar
from ...schemas.train_options import TrainOptions
from ..storage.run.checkpoints import WantedMetric, wanted
from ..tracking.journal import EVAL


def follows_evaluations(options: TrainOptions) -> bool:
    """Whether the metric of `train.best` is one of held-out rows."""
    return wanted(options.best).metric.startswith(EVAL)


def with_evaluation(
    so_far: BestSoFar | None, metrics: Mapping[str, float], *, step: int, options: TrainOptions
) -> BestSoFar:
    """The best evaluation so far, this one included; of another metric it begins anew."""
    target = wanted(options.best)
    value = metrics.get(target.metric, math.nan)
    if so_far is None or so_far.metric != options.best:
        known = value if math.isfinite(value) else None
        since = int(known is None)
        return BestSoFar(options.best, value=known, step=step, newest=step, since=since)
    if so_far.newest == step:  # made again after a stop
        return so_far
    if _is_better(value, so_far.value, target):
        return replace(so_far, value=value, step=step, newest=step, since=0)
    return replace(so_far, newest=step, since=so_far.since + 1)


def _is_better(value: float, best: float | None, target: WantedMetric) -> bool:
    if best is None or not math.isfinite(value):
        return math.isfinite(value)
    return value < best if target.is_lowest else value > best


def why_over(so_far: BestSoFar | None, options: TrainOptions) -> str:
    """The reason to end before the last step, as a clause; empty to go on."""
    if not options.patience or so_far is None or so_far.metric != options.best:
        return ""
    if so_far.since < options.patience:
        return ""
    name, times = wanted(so_far.metric).metric, so_far.since
    if so_far.value is None:
        return f"{name} was not finite in {times} evaluations in a row (train.patience)"
    return (
        f"in {times} evaluations in a row {name} was not better than {so_far.value:.6g}, of step "
        f"{so_far.step:,} (train.patience)"
    )
