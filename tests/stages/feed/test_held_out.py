import numpy as np
import pytest

from align.stages.feed.cache_index import held_out


def keys(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def split(some, fraction):
    return held_out(np.asarray(some, dtype=np.uint64), fraction).tolist()


def test_a_prompt_stands_on_one_side_whatever_stands_around_it():
    some = keys(200)
    sides = split(some, 0.3)
    again = split([*keys(50, seed=1), *some[::-1]], 0.3)
    assert again[50:] == sides[::-1]


def test_a_larger_fraction_keeps_what_a_smaller_one_held_out():
    small, large = split(keys(2000), 0.1), split(keys(2000), 0.2)
    assert all(now for before, now in zip(small, large, strict=True) if before)


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.95])
def test_about_the_fraction_that_was_asked_for_is_held_out(fraction):
    share = np.mean(split(keys(4000), fraction))
    assert abs(share - fraction) < 4 * (fraction * (1 - fraction) / 4000) ** 0.5


def test_nothing_and_everything_can_be_held_out():
    some = [0, 2**64 - 1, *keys(9).tolist()]
    assert split(some, 0.0) == [False] * 11
    assert split(some, 1.0) == [True] * 11
    assert split([0, 2**64 - 1], 0.5) == [True, False]
