"""The metric of `train.best` has to exist."""

from __future__ import annotations

from collections.abc import Iterable

from ...schemas.errors import UsageError, closest, did_you_mean
from ...schemas.train_options import TrainOptions
from ...stages.storage.run.checkpoints import wanted
from ...stages.tracking.journal import EVAL


class BestMetric:
    """Checks once, at the first measurement, that the `best` metric exists."""

    def __init__(self, train: TrainOptions) -> None:
        self._metric = wanted(train.best).metric
        self._is_open = bool(train.best)
        self._is_needed = bool(train.patience or train.write_best)

    def warning(self, names: Iterable[str]) -> str:
        """The warning when it is not among these names; empty when it is.

        UsageError if the end of the run would follow from it.
        """
        known = sorted(names)
        kind = [name for name in known if name.startswith(EVAL) == self._metric.startswith(EVAL)]
        if not self._is_open or not kind:
            return ""
        self._is_open = False
        if self._metric in known:
            return ""
        hint = did_you_mean(closest(self._metric, kind)) or f" Known: {', '.join(kind)}."
        lacks = f"train.best: nothing called {self._metric} was measured.{hint}"
        # A metric of training rows may be missing in a step by chance: the end of the run tells.
        if self._is_needed and self._metric.startswith(EVAL):
            raise UsageError(lacks)
        return f"{lacks} Where it is missing, no checkpoint is kept as the best."
