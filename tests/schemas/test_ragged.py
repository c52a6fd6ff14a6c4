import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.rows import Ragged

LISTS = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8)


def plain(ragged):
    return [values.tolist() for values in ragged]


@given(LISTS)
def test_what_goes_in_comes_out(lists):
    assert plain(Ragged.of(lists, np.int32)) == lists


@given(LISTS, st.data())
def test_take_picks_lists_in_the_order_asked(lists, data):
    picks = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=9)) if lists else []
    taken = Ragged.of(lists, np.int32).take(np.array(picks, dtype=np.int64))
    assert plain(taken) == [lists[pick] for pick in picks]


@given(LISTS, LISTS)
def test_concat_joins(first, second):
    joined = Ragged.concat([Ragged.of(first, np.int32), Ragged.of(second, np.int32)])
    assert plain(joined) == first + second


@given(LISTS, st.data())
def test_a_slice_is_a_slice(lists, data):
    start = data.draw(st.integers(0, len(lists)))
    stop = data.draw(st.integers(start, len(lists)))
    assert plain(Ragged.of(lists, np.int32).slice(start, stop)) == lists[start:stop]


@given(LISTS, st.data())
def test_head_keeps_the_beginning(lists, data):
    limits = [data.draw(st.integers(0, 6)) for _ in lists]
    headed = Ragged.of(lists, np.int32).head(np.array(limits, dtype=np.int64))
    expected = [values[:limit] for values, limit in zip(lists, limits, strict=True)]
    assert plain(headed) == expected
