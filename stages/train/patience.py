"""The best evaluation by train.best, and the end of a training without improvement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ...schemas.checkpoint import Best
from ...schemas.errors import UsageError, closest, did_you_mean
from ...schemas.train_options import TrainOptions
from ..storage.run.checkpoints import best_metric
from ..tracking.metrics_log import EVAL, prefix_of


def best_of_sets(best: str, names: Sequence[str]) -> str:
    """train.best with the name of its held-out set, the first unless it names one, and a sign.

    Without the sign, a set named "errors" would make the lowest value the best.
    """
    target = best_metric(best)
    if not any(names) or not target.metric.startswith(EVAL):
        return best
    metric = target.metric.removeprefix(EVAL)
    first, _, rest = metric.partition("/")
    name, metric = (first, rest) if rest and first in names else (names[0], metric)
    is_lowest = target.is_lowest if best[0] in "+-" else best_metric(metric).is_lowest
    return f"{'-' if is_lowest else '+'}{prefix_of(name)}{metric}"


def with_evaluation(
    best: Best | None, metrics: Mapping[str, float], *, step: int, options: TrainOptions
) -> Best:
    """The best evaluation so far, with this one; another metric starts again."""
    target = best_metric(options.best)
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
    """The reason to end before the last step, as a clause; empty to continue."""
    if not options.patience or best is None or best.metric != options.best:
        return ""
    if best.since < options.patience:
        return ""
    name, times = best_metric(best.metric).metric, best.since
    if best.value is None:
        return f"{name} was not finite in {times} evaluations in a row (train.patience)"
    return (
        f"{name} was not better than {best.value:.6g}, of step {best.step:,}, in {times} "
        "evaluations in a row (train.patience)"
    )


def why_unmeasured(options: TrainOptions, names: Iterable[str]) -> str | None:
    """A warning if the metric of train.best is missing among these; empty if it is among them.

    None if these are metrics of training steps and that one is of held-out rows, or the reverse.
    UsageError if the missing metric would end the run or choose its model.
    """
    metric = best_metric(options.best).metric
    kind = sorted(name for name in names if name.startswith(EVAL) == metric.startswith(EVAL))
    if not kind:
        return None
    if metric in kind:
        return ""
    hint = did_you_mean(closest(metric, kind)) or f" Known: {', '.join(kind)}."
    lacks = f"train.best: no metric {metric} was measured.{hint}"
    # A metric of training rows may be missing in a step by chance, so this is only a warning.
    if (options.patience or options.write_best) and metric.startswith(EVAL):
        raise UsageError(lacks)
    return f"{lacks} Without it, no checkpoint is kept as the best."
