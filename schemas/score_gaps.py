"""Comparison of scores up to rounding, for pairs and labels.

Scores may have rounding errors of float32: 0.1 + 0.2 must equal 0.3, and 0.8 must not be more than
0.1 above 0.7. So two scores are equal if they differ by at most a millionth of the larger one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-6  # as a share of the larger score


def further_apart(
    better: NDArray[np.float64], worse: NDArray[np.float64], gap: float
) -> NDArray[np.bool_]:
    """Whether each score exceeds the other by more than the gap and rounding."""
    size = np.maximum(np.maximum(np.abs(better), np.abs(worse)), gap)
    with np.errstate(over="ignore"):  # the largest floats overflow
        is_far: NDArray[np.bool_] = better - worse - gap > TOLERANCE * size
    return is_far


def is_above(score: float, other: float) -> bool:
    """Whether a score exceeds another by more than rounding."""
    return score - other > TOLERANCE * max(abs(score), abs(other))


def without_rounding(scores: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """The scores; those of one row that differ only by rounding all become the highest of them."""
    order = np.lexsort((-scores, rows))
    ranked, row = scores[order], rows[order]
    begins = np.ones(len(ranked), dtype=np.bool_)
    begins[1:] = (row[1:] != row[:-1]) | further_apart(ranked[:-1], ranked[1:], 0.0)
    equalized = np.empty_like(scores)
    equalized[order] = ranked[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return equalized
