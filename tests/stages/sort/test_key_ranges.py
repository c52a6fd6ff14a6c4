"""Rows that wait by key range come back sorted and with all of their columns, or not at all."""

import numpy as np
import pytest

from align.schemas.errors import CorruptionError
from align.schemas.row_keys import key_rows
from align.stages.pairing.fitted_partners import CutRule
from align.stages.pairing.units import build_unit
from align.stages.sort import key_ranges, sorted_rows
from align.stages.sort.key_ranges import sorted_partition
from align.stages.sort.page_columns import to_page
from align.stages.sort.pages import PAGE
from support.encoded_rows import encoded, plain, ring_of_files, write_encoded
from support.marked_rows import MarkedKeys, marked

RECORDS = [encoded([row % 7], [row, 1], [row, 2], row=row) for row in range(40)]
RANGES = 3


@pytest.fixture
def partitioned(tmp_path, monkeypatch):
    """Rows in two portions of three key ranges."""
    monkeypatch.setattr(key_ranges, "TOKENS_PER_PORTION", 1)
    chunks = [key_rows(some, seed=0, carried=()) for some in (RECORDS[:20], RECORDS[20:])]
    return write_encoded(tmp_path, 0, chunks, RANGES)


def read(file):
    found = [sorted_partition([file], number) for number in range(RANGES)]
    return [row for keyed in found if keyed for row in plain(keyed)]


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.long)])
def test_every_byte_of_what_is_divided_is_checked_where_it_is_read(partitioned, step):
    path, block = partitioned.path, partitioned.directory
    good, expected = path.read_bytes(), read(partitioned)
    assert len(expected) == len(RECORDS)
    end_of_stream = range(block.start - 8, block.start)
    for place in range(0, len(good), step):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x40]) + good[place + 1 :])
        if place in end_of_stream:
            assert read(partitioned) == expected
        else:
            with pytest.raises(CorruptionError, match=rf"/{path.name} is damaged"):
                read(partitioned)
    for size in range(len(good) - 1, -1, -step):
        path.write_bytes(good[:size])
        with pytest.raises(CorruptionError, match=rf"/{path.name} is damaged"):
            read(partitioned)


def test_zeros_or_the_entry_of_another_page_are_not_taken_for_an_entry(partitioned):
    path, first, size = partitioned.path, partitioned.directory.start, PAGE.itemsize
    good = path.read_bytes()
    count = 2 * RANGES
    assert len(good) == first + count * size
    for number in range(count):
        place = first + number * size
        other = first + (number + RANGES) % count * size  # of the same range in the other portion
        for wrong in (bytes(size), good[other : other + size]):
            path.write_bytes(good[:place] + wrong + good[place + size :])
            with pytest.raises(CorruptionError, match=rf"/{path.name} is damaged"):
                read(partitioned)


def test_a_column_that_is_added_comes_through_the_sort_and_with_the_partners(tmp_path, monkeypatch):
    """Its first portion has no marks, so they have their missing value there."""
    for module in (key_ranges, sorted_rows):
        monkeypatch.setattr(module, "KeyedRows", MarkedKeys)
    monkeypatch.setattr(key_ranges, "TOKENS_PER_PORTION", 1)
    records = [encoded([row], [row, 1, 2], [row, 2], row=row) for row in range(40)]
    keyed = [key_rows(some, seed=0, carried=()) for some in (records[:20], records[20:])]
    chunks = [
        MarkedKeys(marked(each.rows, with_marks=bool(number)), each.ring_keys, each.completion_keys)
        for number, each in enumerate(keyed)
    ]
    files = [write_encoded(tmp_path, 0, chunks, RANGES)]
    ring, _ = ring_of_files(tmp_path, files, RANGES, num_pairs=1)
    rows = build_unit(ring, 0, 40, CutRule(3, frozenset())).rows  # a prompt and two tokens
    is_own = np.tile([True, True, False, False], 40)
    assert (rows.number == rows.row + 1).all()
    assert rows.completions.lengths.max() == 3
    assert (rows.name == 3 * (rows.completions.lengths + rows.cut)).all()
    assert rows.cut[is_own].max() == 0 < rows.cut[~is_own].max()
    assert (rows.guess[is_own] == rows.roles[is_own] + 0.5).all()
    assert (rows.guess[~is_own] == -1).all()
    for ids, marks in zip(rows.completions, rows.marks, strict=True):
        assert marks.tolist() == [-2 if ids[0] < 20 else 2 * token for token in ids]


def test_pages_without_a_column_of_tokens_keep_none():
    rows = key_rows(RECORDS, seed=0, carried=("weight",)[:0])
    keyed = MarkedKeys(marked(rows.rows, with_marks=False), rows.ring_keys, rows.completion_keys)
    page = to_page(keyed)
    assert key_ranges.from_page(MarkedKeys, page).rows.marks is None
    assert "rows.marks" in {each.name for each in page.schema.field("branches").type.value_type}
