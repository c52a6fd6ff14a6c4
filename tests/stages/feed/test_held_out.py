import numpy as np
import pytest

from align.schemas.ragged import Ragged
from align.stages.feed.held_out import held_out


def prompts(count, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 1000, draw.integers(1, 20)) for _ in range(count)]


def split(lists, fraction):
    return held_out(Ragged.of(lists, np.int32), fraction).tolist()


def test_a_prompt_stands_on_one_side_whatever_stands_around_it():
    some = prompts(200)
    sides = split(some, 0.3)
    again = split([*prompts(50, seed=1), *reversed(some)], 0.3)
    assert again[50:] == sides[::-1]


def test_a_larger_fraction_keeps_what_a_smaller_one_held_out():
    small, large = split(prompts(2000), 0.1), split(prompts(2000), 0.2)
    assert all(now for before, now in zip(small, large, strict=True) if before)


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.95])
def test_about_the_fraction_that_was_asked_for_is_held_out(fraction):
    share = np.mean(split(prompts(4000), fraction))
    assert abs(share - fraction) < 4 * (fraction * (1 - fraction) / 4000) ** 0.5


def test_nothing_and_everything_can_be_held_out():
    assert split(prompts(9), 0.0) == [False] * 9
    assert split(prompts(9), 1.0) == [True] * 9


def test_the_split_of_these_prompts_never_changes():
    """A changed hash would let prompts cross the split between two versions."""
    assert split([[1, 2, 3], [4], [], [5, 6]], 0.5) == [True, True, True, False]
