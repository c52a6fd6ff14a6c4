"""Comparison of scores up to rounding, by which pairs and labels are made."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

# Two scores, their difference and the gap are each rounded once.
ROUNDINGS = 4
ROUNDED = 1 + 1e-9  # 1.15 x 100 is less than 115 as binary numbers
DIGITS = 12  # significant digits of a score that are kept in a difference


def further_apart(
    better: NDArray[np.float64], worse: NDArray[np.float64], gap: float
) -> NDArray[np.bool_]:
    """Whether each score exceeds the other by more than the gap and rounding."""
    both = np.stack([better, worse])
    size = np.maximum(np.abs(both).max(axis=0), gap)
    slack = ROUNDINGS * size * precision(both).max(axis=0)
    with np.errstate(over="ignore"):
        is_far: NDArray[np.bool_] = better - worse - gap > slack
    return is_far


def is_above(score: float, other: float) -> bool:
    """Whether a score exceeds another by more than rounding."""
    return bool(further_apart(np.array([score]), np.array([other]), 0.0)[0])


def without_rounding(scores: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """The scores, with those of a row that differ by rounding alone set to the best of them."""
    order = np.lexsort((-scores, rows))
    ranked, row = scores[order], rows[order]
    begins = np.ones(len(ranked), dtype=np.bool_)
    begins[1:] = (row[1:] != row[:-1]) | further_apart(ranked[:-1], ranked[1:], 0.0)
    equalized = np.empty_like(scores)
    equalized[order] = ranked[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return equalized


def as_written(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The decimals that scores were written as, if they were stored in float32."""
    single = np.flatnonzero(precision(scores) > np.finfo(np.float64).eps)
    written = scores.copy()
    written[single] = scores[single].astype(np.float32).astype(str).astype(np.float64)
    return written


def rounded_gaps(gaps: NDArray[np.float64], sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Differences of scores of these sizes, rounded so that 0.3 - 0.1 equals 0.4 - 0.2."""
    scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(sizes.clip(min=1e-280))))
    rounded: NDArray[np.float64] = np.rint(gaps * scale) / scale
    return rounded


def mean_as_written(scores: Sequence[float]) -> float:
    """The mean of the decimals that scores were written as, rounded once, in any order."""
    if min(scores) == max(scores):
        return scores[0]
    written = as_written(np.array(scores)).tolist()
    return float(sum(map(Fraction, map(str, written))) / len(scores))


def precision(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The relative precision that each score may have been rounded to."""
    with np.errstate(over="ignore"):
        is_single = (scores.astype(np.float32) == scores) & (scores.round(6) != scores)
    return np.where(is_single, np.finfo(np.float32).eps, np.finfo(np.float64).eps)
