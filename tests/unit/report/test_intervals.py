"""Intervals hold what they say, and chance is told apart from a difference."""

from fractions import Fraction
from math import comb, erfc, sqrt

import numpy as np
import pytest

from align.stages.report.intervals import interval_of_mean, interval_of_rate, mcnemar


def test_chance_is_a_coin_thrown_for_each_row_that_flips():
    assert mcnemar(1, 5) == pytest.approx(2 * (1 + 6) / 64)
    assert mcnemar(0, 0) == mcnemar(3, 3) == mcnemar(4, 3) == 1
    drawn = np.random.default_rng(7).integers(300, size=(20, 2)).tolist()
    for one, other in ((2, 11), (11, 29), (400, 500), *drawn):
        n, fewer = one + other, min(one, other)
        exact = 2 * Fraction(sum(comb(n, k) for k in range(fewer + 1)), 2**n)
        assert mcnemar(one, other) == pytest.approx(min(1, float(exact)), rel=1e-12)
        assert mcnemar(other, one) == mcnemar(one, other)


def test_chance_of_twenty_thousand_flips_is_that_of_the_normal_law():
    """Their number is normal: 200 below the mean of 10,000, the deviation is √5,000."""
    normal = erfc(199.5 / sqrt(5_000) / sqrt(2))
    assert mcnemar(9_800, 10_200) == pytest.approx(normal, rel=1e-3)


def test_values_of_one_unit_are_drawn_together():
    values, units = np.array([1.0, 1, 1, 1, 0, 0]), np.array(list("aaaabc"))
    sums, counts = np.array([4.0, 0, 0]), np.array([4, 1, 1])
    assert interval_of_mean(values, units) == interval_of_rate(sums, counts)
    alone = interval_of_mean(values, np.arange(6))
    assert alone != interval_of_rate(sums, counts)


def test_an_interval_holds_the_truth_95_times_in_100():
    """Rows of one prompt have half of their spread in common; 1 to 3 of them have the same."""
    random, held, times = np.random.default_rng(5), 0, 300
    for _ in range(times):
        units = np.repeat(np.arange(60), random.integers(1, 4, size=60))
        values = 0.3 + random.normal(size=60)[units] + random.normal(size=len(units))
        low, high = interval_of_mean(values, units, seed=int(random.integers(1 << 30)))
        held += low <= 0.3 <= high
    assert 0.92 <= held / times <= 0.98


def test_two_equal_runs_are_rarely_told_apart():
    random, times = np.random.default_rng(6), 2000
    flipped = random.binomial(200, 0.15, size=times)
    chances = [
        mcnemar(n - one, one) for n, one in zip(flipped, random.binomial(flipped, 0.5), strict=True)
    ]
    assert sum(chance < 0.05 for chance in chances) / times <= 0.05
