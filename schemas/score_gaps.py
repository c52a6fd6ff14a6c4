"""Comparison of scores up to rounding, by which pairs and labels are made.

Scores were computed and stored with rounding, perhaps in float32: 0.8 is not more than 0.1 above
0.7, and 0.1 + 0.2 equals 0.3. So two scores are equal if they differ by no more than a millionth of
the larger one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-6  # of the larger score


def further_apart(
    better: NDArray[np.float64], worse: NDArray[np.float64], gap: float
) -> NDArray[np.bool_]:
    """Whether each score exceeds the other by more than the gap and rounding."""
    size = np.maximum(np.maximum(np.abs(better), np.abs(worse)), gap)
    with np.errstate(over="ignore"):  # of the largest numbers that there are
        is_far: NDArray[np.bool_] = better - worse - gap > TOLERANCE * size
    return is_far


def is_above(score: float, other: float) -> bool:
    """Whether a score exceeds another by more than rounding."""
    return score - other > TOLERANCE * max(abs(score), abs(other))


def without_rounding(scores: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """The scores, with those of a row that differ by rounding alone set to the best of them."""
    order = np.lexsort((-scores, rows))
    ranked, row = scores[order], rows[order]
    begins = np.ones(len(ranked), dtype=np.bool_)
    begins[1:] = (row[1:] != row[:-1]) | further_apart(ranked[:-1], ranked[1:], 0.0)
    equalized = np.empty_like(scores)
    equalized[order] = ranked[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return equalized
