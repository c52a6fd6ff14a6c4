"""What is written to a file of sorted rows comes back whatever is asked for, or not at all."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from align.schemas.errors import CorruptionError
from align.schemas.row_keys import key_rows
from align.stages.pairing.sorted_rows import write_rows
from align.stages.pairing.units import Ring
from align.stages.storage import shards
from support.encoded_rows import encoded, make_ring, plain, record_lists
from support.flips import flips

relaxed = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
RECORDS = [encoded([row], [row, 1], [row, 2], row=row) for row in range(40)]


def write(folder, records, cuts=(), *, rows_per_batch=512, carried=("weight",)):
    """Rows in a file, sorted, after they came in some parts."""
    keyed = key_rows(records, seed=0, carried=carried).in_ring_order()
    edges = sorted({0, *(cut % len(records) for cut in cuts), len(records)})
    parts = [keyed.take(np.arange(start, stop)) for start, stop in pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "ROWS_PER_GROUP", rows_per_batch)
        return write_rows(folder / "rows.arrows", parts), plain(keyed)


@relaxed
@given(record_lists(with_scores=True), st.lists(st.integers(0, 99)), st.integers(1, 9), st.data())
def test_any_range_reads_what_was_written(new_folder, records, cuts, most, data):
    rows, expected = write(new_folder(), records, cuts, rows_per_batch=most)
    assert len(rows) == len(records)
    start = data.draw(st.integers(0, len(records) - 1))
    stop = data.draw(st.integers(start + 1, len(records)))
    assert plain(rows.read(start, stop)) == expected[start:stop]
    assert [row for keyed in rows.batches() for row in plain(keyed)] == expected
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
    assert [tuple(ids.tolist()) for ids in found.ids] == [every[index][0] for index in wanted]
    assert found.cut.tolist() == [every[index][3] for index in wanted]
    assert found.places.tolist() == [every[index][4] for index in wanted]


@relaxed
@given(record_lists(prompts=3), st.integers(1, 9), st.data())
def test_all_rows_between_two_places_are_found_and_no_others(new_folder, records, most, data):
    rows, expected = write(new_folder(), records, rows_per_batch=most)
    edge = st.one_of(st.sampled_from([row.place for row in expected]), st.integers(0, 2**64 - 1))
    first, last = sorted((data.draw(edge), data.draw(edge)))
    found = [row for keyed in rows.within(first, last) for row in plain(keyed)]
    assert found == [row for row in expected if first <= row.place <= last]


@relaxed
@given(record_lists(prompts=1), st.integers(1, 9), st.data())
def test_of_one_prompt_no_row_between_two_ids_is_left_out(new_folder, records, most, data):
    rows, expected = write(new_folder(), records, rows_per_batch=most)
    ids = sorted(row.row_id for row in expected)
    ends = st.integers(0, len(ids) - 1)
    low, high = sorted((data.draw(ends), data.draw(ends)))
    parts = rows.within(0, 2**64 - 1, ids=(ids[low].rstrip(b"\0"), ids[high].rstrip(b"\0")))
    found = [plain_row.row_id for keyed in parts for plain_row in plain(keyed)]
    assert [each for each in found if ids[low] <= each <= ids[high]] == [
        each for each in ids if ids[low] <= each <= ids[high]
    ]
    assert len(found) <= high - low + 1 + 2 * (most - 1) + ids.count(ids[low]) + ids.count(
        ids[high]
    )


def test_carried_columns_may_have_any_name(tmp_path):
    name = "a/b ü \0 row"
    records = [encoded([1], [2], carried={name: 0.25}), encoded([1], [3], carried={name: -0.5})]
    rows, _ = write(tmp_path, records, carried=(name,))
    assert sorted(rows.read(0, 2).rows.carried[name].tolist()) == [-0.5, 0.25]


def test_row_ids_that_end_in_zero_bytes_are_kept_whole(tmp_path):
    keyed = key_rows([encoded([1], [2])], seed=0, carried=())
    ids = np.frombuffer(b"\1" + bytes(15), dtype="S16")
    rows = write_rows(
        tmp_path / "rows.arrows", [replace(keyed, rows=replace(keyed.rows, row_id=ids))]
    )
    assert plain(rows.read(0, 1))[0].row_id == b"\1" + bytes(15)


def test_any_arrow_reader_opens_the_files_of_a_ring(tmp_path):
    ring, _ = make_ring(tmp_path, RECORDS, num_pairs=2)
    frame = pl.read_ipc_stream(ring.rows_file)
    assert frame["place"].is_sorted()
    assert sorted(frame["prompt"].to_list()) == [record.prompt for record in RECORDS]
    assert sorted(branch["ids"] for branch in frame["branches"].explode()) == sorted(
        ids for record in RECORDS for ids in record.completions
    )
    partners = pl.read_ipc_stream(ring.partners_file)
    assert partners.columns == ["partner_1", "partner_2"]
    assert all(sorted(partners[name]) == list(range(80)) for name in partners.columns)
    assert np.load(ring.index_file)["row"].tolist() == [40]


def read_all(folder):
    """Every byte of a ring that its users may ask for."""
    ring = Ring(folder, 2)
    rows = plain(ring.rows.read(0, len(ring.rows)))
    return rows, ring.partners(0, ring.rows.num_completions).tolist()


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_no_flipped_bit_is_read(tmp_path, monkeypatch, count):
    monkeypatch.setattr(shards, "ROWS_PER_GROUP", 7)
    ring, _ = make_ring(tmp_path, RECORDS, num_pairs=2)
    whole = read_all(tmp_path)
    files = [ring.rows_file, ring.partners_file, ring.index_file]
    good = {file: file.read_bytes() for file in files}
    # The mark of the end of a stream is for other readers.
    sizes = {file: len(good[file]) - 8 * (file.suffix == ".arrows") for file in files}
    for file, byte, bit in flips(sizes, count):
        damaged = bytearray(good[file])
        damaged[byte] ^= 1 << bit
        file.write_bytes(damaged)
        with pytest.raises(CorruptionError, match=rf"/{file.name} is damaged: .* Remove this file"):
            read_all(tmp_path)
        file.write_bytes(good[file])
    assert read_all(tmp_path) == whole


@pytest.mark.parametrize("name", ["rows.arrows", "partners.arrows", "index.npy"])
@pytest.mark.parametrize("harm", ["short", "gone"])
def test_a_file_that_is_not_whole_is_not_read(tmp_path, name, harm):
    make_ring(tmp_path, RECORDS, num_pairs=2)
    path = tmp_path / name
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptionError, match=rf"/{name} is damaged"):
        read_all(tmp_path)
    assert Ring(tmp_path, 2).is_whole == (harm == "short")


def test_only_the_batches_that_are_read_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "ROWS_PER_GROUP", 10)
    ring, _ = make_ring(tmp_path, RECORDS)
    damaged = bytearray(ring.rows_file.read_bytes())
    damaged[-16] ^= 1
    ring.rows_file.write_bytes(damaged)
    assert len(ring.rows.read(0, 30)) == 30
    with pytest.raises(CorruptionError):
        ring.rows.read(25, 31)


def test_nothing_but_the_ring_is_left_in_its_folder(tmp_path):
    make_ring(tmp_path, RECORDS, num_pairs=1, chunk=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["index.npy", "partners.arrows", "rows.arrows"]


def test_keys_that_change_while_partners_are_chosen_are_noticed(tmp_path, monkeypatch):
    from align.stages.pairing import units  # noqa: PLC0415

    kept = units.choose_partners

    def meddle(prompts, *others, **more):
        found = kept(prompts, *others, **more)
        prompts[3] ^= np.uint64(1)
        return found

    monkeypatch.setattr(units, "choose_partners", meddle)
    with pytest.raises(CorruptionError, match=r"/keys\.bin is damaged"):
        make_ring(tmp_path, RECORDS, num_pairs=1)
    assert not Ring(tmp_path, 1).is_whole
