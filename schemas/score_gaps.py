"""When two scores count as equal: the rule that pairs and labels are made by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Two scores, their difference and the gap are each rounded once.
ROUNDINGS = 4


def further_apart(
    better: NDArray[np.float64], worse: NDArray[np.float64], gap: float
) -> NDArray[np.bool_]:
    """Whether each score is above the other by more than the gap, and not by rounding alone."""
    both = np.stack([better, worse])
    size = np.maximum(np.abs(both).max(axis=0), gap)
    slack = ROUNDINGS * size * precision(both).max(axis=0)
    is_far: NDArray[np.bool_] = better - worse - gap > slack
    return is_far


def precision(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The relative precision that each score may have been rounded to."""
    with np.errstate(over="ignore"):
        is_single = (scores.astype(np.float32) == scores) & (scores.round(6) != scores)
    return np.where(is_single, np.finfo(np.float32).eps, np.finfo(np.float64).eps)
