"""The order of rows, against lists that are made in full."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.columns import offsets_of
from align.stages.feed.epoch_order import (
    ROW_GROUPS_PER_WINDOW,
    key_of,
    shuffled,
    shuffled_order,
)

SIZES = st.lists(st.integers(0, 9), max_size=60)


def order_of(sizes, *, seed=0, epoch=0):
    return shuffled_order(offsets_of(sizes), seed=seed, epoch=epoch)


@settings(max_examples=200)
@given(SIZES, st.integers(0, 3), st.integers(0, 3), st.data())
def test_every_row_stands_at_one_position_and_a_part_is_cut_from_the_whole(
    sizes, seed, epoch, data
):
    order = order_of(sizes, seed=seed, epoch=epoch)
    whole = order.rows(0, len(order)).tolist()
    assert sorted(whole) == list(range(sum(sizes)))
    start = data.draw(st.integers(0, len(order)))
    stop = data.draw(st.integers(start, len(order)))
    assert order.rows(start, stop).tolist() == whole[start:stop]


@settings(max_examples=100)
@given(SIZES)
def test_a_window_holds_whole_row_groups_and_few_of_them(sizes):
    order = order_of(sizes)
    starts = offsets_of(sizes)
    for window in range(order.num_windows):
        groups = order.groups_of(window)
        assert 1 <= len(groups) <= ROW_GROUPS_PER_WINDOW
        rows = {row for group in groups for row in range(starts[group], starts[group + 1])}
        assert set(order.window_rows(window).tolist()) == rows
        first = int(order.window_offsets[window])
        assert order.window_at(first) == order.window_at(first + len(rows) - 1) == window


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}])
def test_seed_and_epoch_each_give_another_order(change):
    sizes = [20] * 40
    same, other = order_of(sizes), order_of(sizes, **change)
    assert same.rows(0, 800).tolist() == order_of(sizes).rows(0, 800).tolist()
    assert np.mean(same.rows(0, 800) == other.rows(0, 800)) < 0.02
    assert np.mean(same.groups == other.groups) < 0.2


def test_the_order_of_these_rows_never_changes():
    """A run that goes on under another version must meet the rows it has not seen."""
    assert order_of([3, 2, 4]).rows(0, 9).tolist() == [2, 0, 3, 1, 6, 5, 8, 4, 7]


def test_every_place_is_as_likely():
    """Chi-square over where each of 8 rows comes to stand in 4000 shuffles."""
    counts = np.zeros((8, 8))
    for epoch in range(4000):
        for place, row in enumerate(shuffled(np.arange(8), key_of("test", epoch))):
            counts[row, place] += 1
    statistic = ((counts - 500) ** 2 / 500).sum()
    assert statistic < 85.4  # 49 degrees of freedom, p = 0.001
