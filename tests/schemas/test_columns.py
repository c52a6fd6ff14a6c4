"""What holds of every column of a table of rows holds of one that somebody adds."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.schemas import columns
from align.schemas.batches import MicroBatch, StepBatch
from align.schemas.columns import ColumnTable, Ragged
from align.schemas.row_keys import key_rows
from align.schemas.rows import Role, ScoredBlock
from align.stages.feed.row_selection import ReadSpec, as_read
from align.stages.feed.smaller_batches import cut_smaller
from align.stages.pairing.long_form import merge_same_prompts
from support.encoded_rows import encoded
from support.made_caches import block_of
from support.marked_rows import MarkedRows, marked


def require_marked(rows):
    """Each added column still says what the other one says."""
    assert isinstance(rows, MarkedRows)
    assert (rows.number == rows.row + 1).all()
    assert (rows.marks.offsets == rows.completions.offsets).all()
    assert (rows.marks.values == rows.completions.values * 2).all()
    assert (rows.name == rows.completions.lengths * 3).all()
    assert len(rows.guess) == len(rows.roles)


def scored(seed, *, rows=5):
    block = block_of(rows, seed, token_logps=True, carried=("weight",))
    return replace(block, rows=marked(block.rows))


@given(st.integers(0, 99), st.lists(st.integers(0, 4), max_size=8))
def test_rows_are_taken_and_joined_with_all_of_their_columns(seed, numbers):
    one, other = scored(seed), scored(seed + 1)
    rows = np.array(numbers, np.int64)
    taken = one.take(rows)
    require_marked(taken.rows)
    assert (taken.rows.guess == taken.rows.roles + 0.5).all()
    ends = one.rows.branch_offsets
    own = [range(ends[row], ends[row + 1]) for row in numbers]
    assert taken.logps.tolist() == [one.logps[branch] for branches in own for branch in branches]
    assert len(taken.token_logps) == len(taken.logps)
    both = ScoredBlock.concat([one, other])
    require_marked(both.rows)
    for first, part in ((0, one), (5, other)):
        again = both.take(np.arange(first, first + 5))
        assert (again.rows.row_id == part.rows.row_id).all()
        assert (again.rows.guess == part.rows.guess).all()
        assert (again.logps == part.logps).all()


def test_a_branch_that_is_added_has_a_value_in_every_column():
    rows = marked(block_of(3, 1).rows)
    count = len(rows.roles)
    order, offsets = np.arange(count + 1), rows.branch_offsets + np.array([0, 0, 0, 1])
    given = {
        "completions": Ragged.of([[7, 8]], np.int32),
        "roles": np.array([Role.MISMATCHED], np.int8),
        "cut": np.array([4], np.int32),
    }
    with pytest.raises(AssertionError, match="an added branch needs a value"):
        rows.with_branches(order, offsets, **given)  # no name
    given["name"] = np.array([6])
    more = rows.with_branches(order, offsets, **given, marks=Ragged.of([[14, 16]], np.int32))
    require_marked(more)
    assert more.guess[-1] == -1
    assert np.isnan(more.scores[-1])
    with pytest.raises(AssertionError, match="no columns of branches"):
        rows.with_branches(order, offsets, **given, other=order[:1])


def test_a_token_without_a_value_has_the_missing_one():
    rows = marked(block_of(3, 1).rows)
    unmarked = replace(rows, marks=None)
    count, ids = len(rows.roles), rows.completions
    both = MarkedRows.concat([unmarked, rows])
    assert both.marks.values.tolist() == [-2] * len(ids.values) + rows.marks.values.tolist()
    assert MarkedRows.concat([unmarked, unmarked]).marks is None
    whole = Ragged(np.full(len(ids.values), -2), ids.offsets)
    assert replace(rows, marks=whole).told("marks") is None
    assert rows.told("marks") is rows.marks
    order, offsets = np.arange(count + 1), rows.branch_offsets + np.array([0, 0, 0, 1])
    given = {
        "completions": Ragged.of([[7, 8]], np.int32),
        "roles": np.array([Role.MISMATCHED], np.int8),
        "cut": np.array([4], np.int32),
        "name": np.array([6]),
    }
    assert rows.with_branches(order, offsets, **given).marks[count].tolist() == [-2, -2]
    assert unmarked.with_branches(order, offsets, **given).marks is None
    more = unmarked.with_branches(order, offsets, **given, marks=Ragged.of([[5, 6]], np.int32))
    assert more.marks.values.tolist() == [-2] * len(ids.values) + [5, 6]


@given(st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_what_goes_before_tokens_goes_before_what_belongs_to_them(lengths):
    rows = marked(block_of(3, 1).rows)
    front = [[100 + index] * length for index, length in enumerate(lengths)]
    front = front[: len(rows.completions)] + [[]] * (len(rows.completions) - len(front))
    longer = rows.with_tokens_before("completions", Ragged.of(front, np.int32))
    for index, before in enumerate(front):
        assert longer.completions[index].tolist() == [*before, *rows.completions[index]]
        assert longer.marks[index].tolist() == [-2] * len(before) + rows.marks[index].tolist()
    assert longer.completions.values.dtype == np.int32


@given(st.integers(0, 99), st.integers(0, 5), st.integers(0, 5))
def test_consecutive_rows_are_cut_out_with_all_of_their_columns(seed, start, stop):
    block = scored(seed)
    start, stop = sorted((start, stop))
    part, taken = block.between(start, stop), block.take(np.arange(start, stop))
    require_marked(part.rows)
    for one, other in ((part, taken), (part.rows, taken.rows)):
        for name, each in one.columns().items():
            values = [getattr(table, name) for table in (one, other)]
            if each.within or each.is_named or all(value is None for value in values):
                continue
            lists = [[*map(list, value)] if each.is_list else value for value in values]
            np.testing.assert_equal(*lists)
    assert part.rows.carried["weight"].tolist() == taken.rows.carried["weight"].tolist()
    assert np.shares_memory(part.rows.row, block.rows.row) or start == stop


@given(st.lists(st.integers(0, 4), min_size=20, max_size=20))
def test_tokens_are_cut_with_what_belongs_to_them(limits):
    rows = marked(block_of(3, 1).rows)
    most = np.array(limits[: len(rows.completions)])
    shorter = rows.with_heads("completions", most)
    for index, limit in enumerate(most.tolist()):
        assert shorter.completions[index].tolist() == rows.completions[index][:limit].tolist()
        assert shorter.marks[index].tolist() == rows.marks[index][:limit].tolist()
    assert rows.with_heads("prompts", np.zeros(3, np.int64)).marks is rows.marks


def test_lists_are_taken_some_at_a_time_and_end_as_if_at_once(monkeypatch):
    lists = Ragged.of([[*range(size)] for size in (3, 0, 7, 1, 0, 12, 2, 0)], np.int32)
    indices = np.array([5, 1, 0, 0, 7, 2, 6, 5, 3, 4])
    for most in (1, 2, 5, 100):
        monkeypatch.setattr(columns, "VALUES_AT_ONCE", most)
        taken = lists.take(indices)
        assert [*map(list, taken)] == [lists[index].tolist() for index in indices]
        assert taken.values.dtype == np.int32
    assert len(lists.take(indices[:0])) == 0


def test_tokens_are_not_replaced_without_what_belongs_to_them():
    block = scored(3)
    fewer = block.rows.completions.head(np.ones(len(block.rows.completions), np.int64))
    with pytest.raises(AssertionError, match="marks of other tokens"):
        replace(block.rows, completions=fewer)
    shorter = replace(block.rows, completions=fewer, marks=None)
    with pytest.raises(AssertionError, match="token_logps of other tokens"):
        replace(block, rows=shorter)


def test_what_a_method_reads_and_a_joined_long_form_keep_an_added_column():
    encoded_rows = [
        encoded([5], [row + 6], row=row, roles=(Role.CANDIDATE,), scores=(float(row),))
        for row in range(4)
    ]
    keyed = key_rows(encoded_rows, carried=()).in_key_order()
    keyed = replace(keyed, rows=marked(keyed.rows))
    joined = merge_same_prompts(keyed, Counter(), prompt_side="left")
    require_marked(joined.rows)
    logps = -np.arange(4.0)
    block = ScoredBlock(joined.rows, logps, None)
    spec = ReadSpec("paired", mismatched=False, eval_fraction=0.0)
    read = as_read(block, np.array([0]), spec=spec, source="here")
    require_marked(read.rows)
    micro = MicroBatch(read, np.arange(2))
    sizes = {"rows": 1, "branches": 2, "tokens": 2, "chosen_tokens": 1, "mismatched_branches": 0}
    batch = StepBatch(cursor=None, own=(micro,), mismatched=(), **sizes)
    (again,) = cut_smaller(batch, 1, pads=False).own
    require_marked(again.block.rows)
    assert [tree.prompt.tolist() for tree in again.trees] == [[5]]
    assert again.block.logps.tolist() == read.logps.tolist()


def test_a_table_without_branches_is_taken_row_by_row():
    keys = block_of(4, 2).rows.prompt_keys
    assert isinstance(keys, ColumnTable)
    assert (keys.take(np.array([3, 1])).split == keys.split[[3, 1]]).all()
