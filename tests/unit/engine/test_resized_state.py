"""A rank's part of the values that another number of ranks holds, worked out by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from align.stages.engine.resized_state import cut_for
from support.refusals import refuses

ABC = {"a": 5, "b": 1, "c": 4}


def cut(flats, then, now, *, ranks, alignment):
    """What each of so many ranks gets of what each rank held, as lists."""
    held = [[torch.tensor(flat) for flat in one] for one in flats]
    how = {"then": then, "now": now, "alignment": alignment, "ranks": ranks}
    return [[part.tolist() for part in cut_for(held, rank=rank, **how)] for rank in range(ranks)]


def test_zero_1_and_2_cut_a_group_as_one():
    # Ten values: two ranks hold six each, a multiple of two; the padding at the end is not stored.
    two = [[[1.0, 2, 3, 4, 5, 6]], [[7.0, 8, 9, 10]]]
    group, how = [{"group": 10}], {"alignment": 2}
    three = cut(two, group, group, ranks=3, **how)
    assert three == [[[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9, 10, 0, 0]]]
    assert cut(three, group, group, ranks=1, **how) == [[[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]]


def test_zero_3_cuts_each_parameter_by_itself_and_may_join_others():
    # Of two ranks each holds three of a, one of b and two of c; the last of a and b are padding.
    two = [[[1.0, 2, 3, 6, 7, 8]], [[4.0, 5, 0, 0, 9, 10]]]
    now, how = [{"a": 5}, {"b": 1, "c": 4}], {"alignment": 1}
    three = cut(two, [ABC], now, ranks=3, **how)
    assert three == [[[1, 2], [6, 7, 8]], [[3, 4], [0, 9, 10]], [[5, 0], [0, 0, 0]]]
    assert cut(three, now, [ABC], ranks=1, **how) == [[[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]]


def test_values_that_are_missing_are_refused():
    with refuses(ValueError, "c", 1):
        cut([[[1.0, 2, 3, 6, 7, 8]], [[4.0, 5, 0, 0, 9]]], [ABC], [ABC], ranks=1, alignment=1)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    ways=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    alignment=st.sampled_from([1, 2]),
)
def test_values_survive_any_change_of_ranks(sizes, ways, alignment):
    layout = [{f"p{index}": size for index, size in enumerate(sizes)}]
    # One rank holds each parameter with its padding.
    whole = [[[]]]
    for place, size in enumerate(sizes):
        whole[0][0] += [1.0 + place] * size + [0.0] * (-size % alignment)
    held = whole
    for ranks in (*ways, 1):
        held = cut(held, layout, layout, ranks=ranks, alignment=alignment)
    assert held == whole
