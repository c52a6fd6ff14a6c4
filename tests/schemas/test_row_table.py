"""Rows are regrouped with all of their columns, as lists of Python would be."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.columns import Ragged, packed
from align.schemas.row_table import Rows
from support.made_caches import block_of

PER_ROW = ("row", "file", "prompt_key", "split_key", "prompts", "prompt_cut")
PER_BRANCH = ("roles", "scores", "cut", "completions", "learned", "logps", "token_logps")
TOLD = st.lists(st.integers(0, 2), min_size=20, max_size=20)


def scored(seed, told):
    """Five random rows; 0: all tokens of a completion are learned, else every second one."""
    rows = block_of(5, seed, token_logps=True, carried=("weight",), scores=0.5)
    ids, is_told = rows.completions, np.array(told[: len(rows.completions)]) > 0
    turns = [np.arange(len(one)) % 2 if own else () for one, own in zip(ids, is_told, strict=True)]
    return rows.with_columns(completion_turns=packed(Ragged.of(turns, np.int16), is_told))


def plain(rows):
    """Each row as text of Python values."""

    def values(name, start, stop):
        column = getattr(rows, name)
        if column is None:  # all are learned
            return [[1] * len(rows.completions[at]) for at in range(start, stop)]
        return [column[at].tolist() for at in range(start, stop)]

    found = []
    for at, (row_id, start, stop) in enumerate(
        zip(rows.ids(), rows.branch_offsets, rows.branch_offsets[1:], strict=False)
    ):
        own = [values(name, at, at + 1) for name in PER_ROW]
        inner = [values(name, int(start), int(stop)) for name in PER_BRANCH]
        found.append(repr((row_id, own, float(rows.carried["weight"][at]), inner)))
    return found


@given(st.integers(0, 99), TOLD, TOLD, st.data())
def test_rows_are_taken_joined_and_cut_out_with_all_of_their_columns(seed, told, other, data):
    one, two = scored(seed, told), scored(seed + 1, other)
    both, expected = Rows.concat([one, two]), plain(one) + plain(two)
    assert plain(both) == expected
    numbers = data.draw(st.lists(st.integers(0, 9), max_size=9))
    assert plain(both.take(np.array(numbers, np.int64))) == [expected[row] for row in numbers]
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 10), st.integers(0, 10))))
    part = both.between(start, stop)
    assert plain(part) == expected[start:stop]
    assert plain(Rows.concat([part, one])) == expected[start:stop] + expected[:5]
    turned = np.arange(len(part))[::-1].astype(np.int64)
    assert plain(part.take(turned)) == expected[start:stop][::-1]


@given(st.integers(0, 99), TOLD, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_rows_go_into_record_batches_and_back(seed, told, cuts):
    rows = scored(seed, told)
    ends = np.minimum(np.cumsum([0, *cuts]), 5).tolist()
    batch = rows.to_batch()
    parts = [batch.slice(a, b - a) for a, b in pairwise(ends)]
    found = Rows.of_batches(parts)
    assert plain(found) == plain(rows)[: ends[-1]]


@given(st.integers(0, 99), TOLD)
def test_branches_are_gathered_for_other_rows(seed, told):
    rows = scored(seed, told)
    count = len(rows.completions)
    order = np.arange(count)[::-1].astype(np.int64)
    found = rows.gather(np.array([3, 3]), order, np.array([0, count // 2, count]))
    assert found.row.tolist() == rows.row[[3, 3]].tolist()
    for name in PER_BRANCH:
        if (column := getattr(rows, name)) is not None:
            expected = [column[at].tolist() for at in order.tolist()]
            got = getattr(found, name)
            assert repr([got[at].tolist() for at in range(count)]) == repr(expected)
    trees = [(tree.prompt.tolist(), len(tree.branches)) for tree in found.trees()]
    prompt = rows.prompts[3].tolist()
    assert trees == [(prompt, count // 2), (prompt, count - count // 2)]


def test_a_column_is_replaced_or_added_and_the_others_stay():
    rows = scored(3, [1] * 20)
    changed = rows.with_columns(score=np.full(len(rows.scores), np.nan), weight=np.arange(5.0))
    assert np.isnan(changed.scores).all()
    assert changed.of_branches.column("score").null_count == len(rows.scores)
    assert changed.carried["weight"].tolist() == [0, 1, 2, 3, 4]
    assert changed.completions.values.tolist() == rows.completions.values.tolist()
    assert changed.without("ref_token_logps").token_logps is None
    assert rows.token_logps is not None
