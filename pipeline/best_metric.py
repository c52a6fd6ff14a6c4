"""Whether the metric that the best checkpoint is chosen by is one that is measured."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from ..schemas.errors import UsageError
from ..stages.storage.checkpoints import wanted
from ..stages.tracking.journal import EVAL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..schemas.config import TrainOptions


def require_measured(train: TrainOptions) -> None:
    """Refuses a metric of held-out rows where a run would not measure them on its way."""
    if not wanted(train.best).metric.startswith(EVAL):
        return
    if not train.holds_rows_out:
        raise UsageError(
            f"train.best is {train.best}, but no rows are held out to measure it on. Set "
            "train.eval_fraction or train.eval_cache, or name a metric of the training steps."
        )
    if not train.eval_every:
        raise UsageError(
            f"train.best is {train.best}, but train.eval_every is 0: no checkpoint on the way is "
            "measured. Set it, best to train.save_every."
        )


class BestMetric:
    """Looks once, where the metric would have been measured for the first time."""

    def __init__(self, best: str) -> None:
        self._metric = wanted(best).metric
        self._is_open = bool(best)

    def warning(self, names: Iterable[str]) -> str:
        """What to tell a person when it is not among these names; empty when there is nothing."""
        known = sorted(names)
        kind = [name for name in known if name.startswith(EVAL) == self._metric.startswith(EVAL)]
        if not self._is_open or not kind:
            return ""
        self._is_open = False
        if self._metric in known:
            return ""
        near = get_close_matches(self._metric, kind, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(kind)}."
        return (
            f"train.best: nothing called {self._metric} was measured. {hint} Where it is missing, "
            "no checkpoint is kept as the best."
        )
