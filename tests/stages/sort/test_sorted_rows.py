"""Sorted rows are read by row or completion as they were written, or not at all."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.errors import CorruptionError
from align.schemas.row_keys import key_rows
from align.stages.sort.pages import PageWriter, read_directory
from align.stages.sort.sorted_rows import ROWS_PAGE, SortedRows, joined_directory, write_rows
from align.stages.storage.cache import shards
from align.stages.storage.cache.spool import NewPart
from support.encoded_rows import encoded, plain, record_lists

relaxed = settings(max_examples=25)


def write(folder, records, cuts=(), *, rows_per_batch=512, carried=("weight",)):
    """Rows in a file, sorted, after they came in some parts."""
    keyed = key_rows(records, seed=0, carried=carried).in_ring_order()
    edges = sorted({0, *(cut % len(records) for cut in cuts), len(records)})
    parts = [keyed.take(np.arange(start, stop)) for start, stop in pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "ROWS_PER_GROUP", rows_per_batch)
        return write_files(folder, parts), plain(keyed)


def write_files(folder, parts):
    """Each part in a file of its own."""
    files, directories = [], []
    for number, part in enumerate(parts):
        files.append(folder / f"rows-{number}.arrows")
        with files[-1].open("wb") as sink:
            pages = PageWriter(NewPart(files[-1], sink))
            write_rows(pages, part)
            block = pages.end()
        directories.append(read_directory(files[-1], block, ROWS_PAGE))
    return SortedRows(tuple(files), joined_directory(directories))


@relaxed
@given(record_lists(with_scores=True), st.lists(st.integers(0, 99)), st.integers(1, 9), st.data())
def test_any_range_of_rows_reads_what_was_written(new_folder, records, cuts, most, data):
    rows, expected = write(new_folder(), records, cuts, rows_per_batch=most)
    assert len(rows) == len(records)
    start = data.draw(st.integers(0, len(records) - 1))
    stop = data.draw(st.integers(start + 1, len(records)))
    assert plain(rows.read(start, stop)) == expected[start:stop]
    before = sum(len(row.branches) for row in expected[:start])
    assert rows.first_completion(start) == before


@relaxed
@given(record_lists(), st.integers(1, 9), st.integers(0, 2), st.data())
def test_completions_are_found_anywhere_and_in_the_order_asked_for(
    new_folder, records, most, held, data
):
    rows, expected = write(new_folder(), records, rows_per_batch=most)
    every = [(*branch, row.place) for row in expected for branch in row.branches]
    assert rows.num_completions == len(every)
    wanted = data.draw(st.lists(st.integers(0, len(every) - 1), max_size=30))
    found = replace(rows, held=held).at(np.array(wanted, dtype=np.int64))
    own = found.rows
    assert [tuple(ids.tolist()) for ids in own.completions] == [every[index][0] for index in wanted]
    assert own.cut.tolist() == [every[index][3] for index in wanted]
    assert found.ring_keys.tolist() == [every[index][4] for index in wanted]
    assert (len(own), own.branch_offsets.tolist()) == (len(wanted), [*range(len(wanted) + 1)])


def test_names_of_columns_and_ids_of_rows_may_hold_any_byte(tmp_path):
    name = "a/b ü \0 row"
    records = [encoded([1], [2], carried={name: 0.25}), encoded([1], [3], carried={name: -0.5})]
    rows, _ = write(tmp_path, records, carried=(name,))
    assert sorted(rows.read(0, 2).rows.carried[name].tolist()) == [-0.5, 0.25]
    keyed = key_rows([encoded([1], [2])], seed=0, carried=())
    ids = np.frombuffer(b"\1" + bytes(15), dtype="S16")
    rows = write_files(tmp_path, [replace(keyed, rows=replace(keyed.rows, row_id=ids))])
    assert plain(rows.read(0, 1))[0].row_id == b"\1" + bytes(15)


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.long)])
def test_every_byte_of_the_pages_and_of_their_directory_has_a_checksum(tmp_path, step):
    records = [encoded([row], [row, 1], [row, 2], row=row) for row in range(9)]
    keyed = key_rows(records, seed=0, carried=()).in_ring_order()
    path = tmp_path / "rows.arrows"
    with path.open("wb") as sink, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "ROWS_PER_GROUP", 4)
        pages = PageWriter(NewPart(path, sink))
        write_rows(pages, keyed)
        block = pages.end()
    good, expected = path.read_bytes(), plain(keyed)

    def read():
        rows = SortedRows((path,), joined_directory([read_directory(path, block, ROWS_PAGE)]))
        return plain(rows.read(0, 9))

    end_of_stream = range(block.start - 8, block.start)
    for place in range(0, len(good), step):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x40]) + good[place + 1 :])
        if place in end_of_stream:
            assert read() == expected
        else:
            with pytest.raises(CorruptionError, match=r"/rows\.arrows is damaged"):
                read()
    for size in range(len(good) - 1, -1, -step):
        path.write_bytes(good[:size])
        with pytest.raises(CorruptionError, match=r"/rows\.arrows is damaged"):
            read()
