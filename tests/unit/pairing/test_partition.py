"""Rows that are divided by key range come back sorted, numbered and with all of their columns."""

from collections import Counter
from io import BytesIO
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.errors import CorruptionError
from align.schemas.rows import Role
from align.stages.data.row_keys import key_rows
from align.stages.pairing import partition
from align.stages.pairing.partition import (
    EncodedSlice,
    majority_candidate,
    number_of_ranges,
    number_of_shards,
    write_slice,
)
from support.encoded_rows import encoded, record_lists, shards_of

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "rows", "asked", "ranges", "shards"),
    [
        (0, 0, 0, 1, 1),
        (MIB // 2, 10**6, 0, 1, 1),
        (MIB // 2 + 1, 10**6, 0, 2, 2),
        (9 * MIB, 7_999, 0, 32, 4),
        (9 * MIB, 8_000, 0, 32, 8),
        (20 << 30, 10**7, 0, 1024, 1024),
        (20 << 30, 999, 0, 1024, 1),
        (9 * MIB, 10, 5, 5, 5),
    ],
)
def test_the_number_of_shards_follows_from_bytes_and_rows(size, rows, asked, ranges, shards):
    assert number_of_ranges(size, asked) == ranges
    assert number_of_shards(ranges, rows, asked) == shards


@settings(max_examples=25)
@given(record_lists(with_scores=True), st.randoms(), st.data())
def test_order_chunks_slices_and_ranges_leave_no_trace(new_folder, records, shuffler, data):
    options = {"carried": ("weight",)}
    rows = shards_of(new_folder(), records, **options).all_rows()
    keys = [(row.place, row.row_id, row.copy) for row in rows]
    assert keys == sorted(keys)
    assert sorted(row.source[1] for row in rows) == list(range(len(records)))
    for row in rows:  # each knows where it came from
        source = records[row.source[1]]
        assert row.prompt == tuple(source.prompt)
        assert [completion[0] for completion in row.completions] == [
            tuple(ids) for ids in source.completions
        ]
        assert row.carried == (source.text_row.carried["weight"],)
    shuffled = records[:]
    shuffler.shuffle(shuffled)
    wide = data.draw(st.integers(1, 4))
    options |= {
        "chunk": data.draw(st.integers(1, 8)),
        "per_file": data.draw(st.integers(1, 30)),
        "ranges": wide * data.draw(st.integers(1, 9)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "TOKENS_PER_PORTION", data.draw(st.sampled_from([1, 60, 10**6])))
        patch.setattr(partition, "FILES_OPEN", data.draw(st.sampled_from([1, 99])))
        again = shards_of(new_folder(), shuffled, shards=options["ranges"] // wide, **options)
    assert [row._replace(source=None) for row in again.all_rows()] == [
        row._replace(source=None) for row in rows
    ]


@settings(max_examples=10)
@given(record_lists(prompts=2, alphabet=1), st.integers(1, 4))
def test_rows_of_equal_content_are_numbered_from_zero_as_they_came(new_folder, records, chunk):
    options = {"chunk": chunk, "per_file": 9, "ranges": 2, "carried": ("weight",)}
    shards = shards_of(new_folder(), records, **options)
    rows = shards.all_rows()
    seen = Counter()
    for row in rows:
        assert row.copy == seen[row.row_id]
        seen[row.row_id] += 1
    assert shards.notes["rows_that_repeat_another_row"] == len(rows) - len(seen)
    sources = sorted((row.row_id, row.copy, row.source) for row in rows)
    assert [row[0::2] for row in sources] == sorted(row[0::2] for row in sources)


def test_a_pair_that_is_there_in_both_orders_is_counted_once(tmp_path):
    good, bad, other = [6], [7], [8]
    records = [
        encoded([5], good, bad, row=0),
        encoded([5], good, bad, row=1),
        encoded([5], bad, good, row=2),
        encoded([5], good, other, row=3),
        encoded([9], bad, good, row=4),  # of another prompt
        encoded([9], bad, bad, row=5),
        encoded([3], good, bad, row=6, roles=(Role.CANDIDATE,) * 2),
        encoded([3], bad, good, row=7, roles=(Role.CANDIDATE,) * 2),
    ]
    for ranges in (1, 3):
        shards = shards_of(tmp_path, records, per_file=3, ranges=ranges)
        shards.read()
        assert shards.notes["pairs_in_both_orders"] == 1


def test_the_prompt_of_most_completions_is_found_in_any_order_of_slices():
    """It has six of eleven: three in each of two slices, and another prompt has five."""
    slices = []
    for prompt, completions in ((5, 3), (5, 3), (9, 5)):
        rows = [encoded([prompt], [row + 1], row=row) for row in range(completions)]
        facts = write_slice(BytesIO(), [key_rows(rows, carried=())], ranges=4)
        nothing = {"rows_in": (), "notes": {}, "reasons": {}, "rejected": ()}
        slices.append(EncodedSlice(**facts, **nothing, bytes=0))
    key, uses = slices[0].largest_prompt
    assert uses == 3
    assert {majority_candidate(order) for order in permutations(slices)} == {key}


def test_portions_in_which_all_tokens_are_learned_are_read_with_others(tmp_path, monkeypatch):
    """The first portion says of no completion what is learned, the second of half of them."""
    monkeypatch.setattr(partition, "TOKENS_PER_PORTION", 1)
    turns = (np.array([0, 1], np.int16), None)
    records = [
        encoded([row], [row, 1], [row, 2], row=row, turns=turns if row >= 20 else (None, None))
        for row in range(40)
    ]
    rows = shards_of(tmp_path, records, ranges=4, chunk=20, shards=1).all_rows()
    assert {row.source[1]: row.turns for row in rows} == {
        row: ((0, 1) if row >= 20 else (1, 1), (1, 1)) for row in range(40)
    }


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    records = [encoded([row], [row, 1], row=row) for row in range(40)]
    shards_of(tmp_path, records)
    path = tmp_path / "0.arrow"
    shards = shards_of(tmp_path, records)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptionError, match=rf"{path.name}"):
        shards.read()
    path.unlink()
    with pytest.raises(CorruptionError, match=rf"{path.name}"):
        shards.read()
