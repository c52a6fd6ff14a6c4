"""Patience: a training is over once its evaluations have stopped improving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ...schemas.checkpoint import Best
from ...schemas.train_options import TrainOptions
from ..storage.run.checkpoints import wanted


def with_evaluation(
    best: Best | None, metrics: Mapping[str, float], *, step: int, options: TrainOptions
) -> Best:
    """The best evaluation so far, this one included; of another metric it begins anew."""
    target = wanted(options.best)
    value = metrics.get(target.metric, math.nan)
    if best is None or best.metric != options.best:
        known = value if math.isfinite(value) else None
        return Best(options.best, value=known, step=step, since=int(known is None))
    is_better = math.isfinite(value)
    if is_better and best.value is not None:
        is_better = value < best.value if target.is_lowest else value > best.value
    if is_better:
        return replace(best, value=value, step=step, since=0)
    return replace(best, since=best.since + 1)


def why_over(best: Best | None, options: TrainOptions) -> str:
    """The reason to end before the last step, as a clause; empty to go on."""
    if not options.patience or best is None or best.metric != options.best:
        return ""
    if best.since < options.patience:
        return ""
    name, times = wanted(best.metric).metric, best.since
    if best.value is None:
        return f"{name} was not finite in {times} evaluations in a row (train.patience)"
    return (
        f"in {times} evaluations in a row {name} was not better than {best.value:.6g}, of step "
        f"{best.step:,} (train.patience)"
    )
