"""A smoothed line through a noisy curve: the centred mean over a twentieth of its lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MANY = 60  # lines; of fewer, a person sees the course
PART = 20  # one in so many lines is in a mean
LEAST = 5  # lines of a mean
ROUGH = 4  # how often a noisy curve goes up and down its whole range


def window_of(heights: Sequence[float]) -> int:
    """How many lines are in each mean, an odd number; 0 for a curve that is short or smooth."""
    if len(heights) < MANY or _crossings(np.asarray(heights)) <= ROUGH:
        return 0
    return max(LEAST, len(heights) // PART | 1)


def running_mean(heights: Sequence[float], window: int) -> NDArray[np.float64]:
    """The mean of each value and its neighbours, of those that there are at both ends."""
    half, places = window // 2, np.arange(len(heights))
    counts = np.minimum(places, half) + np.minimum(places[::-1], half) + 1
    # Not by a running sum, which a single huge value would leave without the others' digits.
    means: NDArray[np.float64]
    means = np.convolve(np.asarray(heights, dtype=float), np.ones(window), "same") / counts
    return means


def _crossings(heights: NDArray[np.float64]) -> float:
    """The whole way up and down, in ranges: 1 for a curve that only rises."""
    extent = heights.max() - heights.min()
    return float(np.abs(np.diff(heights)).sum() / extent) if extent else 0.0
