"""Lists of lists in two arrays are what lists of lists are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.rows import Ragged

LISTS = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8)


def plain(ragged):
    return [values.tolist() for values in ragged]


@given(LISTS, LISTS, st.data())
def test_lists_are_taken_joined_sliced_and_shortened_as_lists_are(lists, others, data):
    ragged = Ragged.of(lists, np.int32)
    assert plain(ragged) == lists
    assert plain(Ragged.concat([ragged, Ragged.of(others, np.int32)])) == lists + others
    picks = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=9)) if lists else []
    taken = ragged.take(np.array(picks, dtype=np.int64))
    assert plain(taken) == [lists[pick] for pick in picks]
    start = data.draw(st.integers(0, len(lists)))
    stop = data.draw(st.integers(start, len(lists)))
    assert plain(ragged.slice(start, stop)) == lists[start:stop]
    limits = [data.draw(st.integers(0, 6)) for _ in lists]
    headed = ragged.head(np.array(limits, dtype=np.int64))
    assert plain(headed) == [values[:most] for values, most in zip(lists, limits, strict=True)]
