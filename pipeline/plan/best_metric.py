"""The metric of `train.best`: held-out rows have to be measured for it, and it has to exist."""

from __future__ import annotations

from collections.abc import Iterable

from ...schemas.errors import UsageError, closest, did_you_mean
from ...schemas.train_options import TrainOptions
from ...stages.storage.run.checkpoints import wanted
from ...stages.tracking.journal import EVAL


def require_measured(train: TrainOptions) -> None:
    """Refuses a `best` metric of held-out rows if the run does not measure them."""
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
    """Checks once, at the first measurement, that the `best` metric exists."""

    def __init__(self, best: str) -> None:
        self._metric = wanted(best).metric
        self._is_open = bool(best)

    def warning(self, names: Iterable[str]) -> str:
        """The warning when it is not among these names; empty when it is."""
        known = sorted(names)
        kind = [name for name in known if name.startswith(EVAL) == self._metric.startswith(EVAL)]
        if not self._is_open or not kind:
            return ""
        self._is_open = False
        if self._metric in known:
            return ""
        hint = did_you_mean(closest(self._metric, kind)) or f" Known: {', '.join(kind)}."
        return (
            f"train.best: nothing called {self._metric} was measured.{hint} Where it is missing, "
            "no checkpoint is kept as the best."
        )
