"""Statistical uncertainty: bootstrap intervals, and McNemar's exact test."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000  # bootstrap samples
MOST_DRAWN = 1 << 18  # units drawn at once, to limit memory
TAILS = (0.025, 0.975)


def interval_of_rate(
    sums: NDArray[Any], counts: NDArray[Any], *, seed: int = 0
) -> tuple[float, float]:
    """The 95 % bootstrap interval of the total of `sums` divided by the total of `counts`.

    Each entry is one unit of the bootstrap: a prompt, drawn with all its rows.
    """
    random, units = np.random.default_rng(seed), len(sums)
    at_once = max(1, MOST_DRAWN // units)
    rates = []
    for start in range(0, DRAWS, at_once):
        chosen = random.integers(units, size=(min(at_once, DRAWS - start), units))
        rates.append(sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1))
    low, high = np.quantile(np.concatenate(rates), TAILS)
    return float(low), float(high)


def interval_of_mean(
    values: NDArray[Any], units: NDArray[Any], *, seed: int = 0
) -> tuple[float, float]:
    """The 95 % bootstrap interval of a mean; values of the same unit are drawn together."""
    _, number = np.unique(units, return_inverse=True)
    return interval_of_rate(np.bincount(number, values), np.bincount(number), seed=seed)


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test, from the rows that flip in each direction."""
    flips, fewer = only_first + only_second, min(only_first, only_second)
    # In integers, because the binomial coefficients of many flips overflow a float.
    total, coefficient = 0, 1
    for k in range(fewer + 1):
        total += coefficient
        coefficient = coefficient * (flips - k) // (k + 1)
    return min(1.0, 2 * total / (1 << flips))
