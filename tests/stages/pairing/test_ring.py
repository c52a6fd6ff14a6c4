"""The ring depends on what the rows hold alone; what is written comes back, or not at all."""

import errno
import os
import tracemalloc
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.errors import CorruptionError, StorageError
from align.schemas.row_keys import key_rows
from align.schemas.rows import Role
from align.stages.pairing import kl_partners
from align.stages.pairing import ring as ring_module
from align.stages.pairing.ring import Ring
from align.stages.pairing.units import unit_offsets
from align.stages.sort import key_ranges
from align.stages.storage.cache import shards, spool
from align.stages.storage.cache.spool import Spool, new_map
from support.encoded_rows import (
    all_rows,
    encoded,
    make_ring,
    plain,
    record_lists,
    ring_of_files,
    write_encoded,
)
from support.flips import flips, noticed

relaxed = settings(max_examples=25)


@pytest.mark.slow
@relaxed
@given(record_lists(with_scores=True), st.randoms(), st.data())
def test_order_chunks_runs_files_and_ranges_leave_no_trace(new_folder, records, shuffler, data):
    options = {"carried": ("weight",)}
    rows = all_rows(make_ring(new_folder(), records, **options)[0])
    keys = [(row.place, row.row_id, row.copy) for row in rows]
    assert keys == sorted(keys)
    assert sorted(row.source[1] for row in rows) == list(range(len(records)))
    for row in rows:  # each knows where it came from
        source = records[row.source[1]]
        assert row.prompt == tuple(source.prompt)
        assert [branch[0] for branch in row.branches] == [tuple(ids) for ids in source.completions]
        assert row.carried == (source.record.carried["weight"],)
    expected = [row._replace(source=None) for row in rows]
    shuffled = records[:]
    shuffler.shuffle(shuffled)
    chunk = data.draw(st.integers(1, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_ranges, "TOKENS_PER_PORTION", data.draw(st.sampled_from([1, 60, 10**6])))
        options |= {
            "per_file": data.draw(st.integers(1, 30)),
            "ranges": data.draw(st.integers(1, 9)),
        }
        ring, _ = make_ring(new_folder(), shuffled, chunk=chunk, **options)
    assert [row._replace(source=None) for row in all_rows(ring)] == expected


@settings(max_examples=10)
@given(record_lists(prompts=2, alphabet=1), st.integers(1, 4))
def test_rows_of_equal_content_are_numbered_from_zero(new_folder, records, chunk):
    options = {"chunk": chunk, "per_file": 9, "ranges": 2, "carried": ("weight",)}
    ring, notes = make_ring(new_folder(), records, **options)
    rows = all_rows(ring)
    seen = Counter()
    for row in rows:
        assert row.copy == seen[row.row_id]
        seen[row.row_id] += 1
    assert notes["rows_that_repeat_another_row"] == len(rows) - len(seen)
    sources = sorted((row.row_id, row.copy, row.source) for row in rows)
    assert [row[0::2] for row in sources] == sorted(row[0::2] for row in sources)  # as they came


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
        _, notes = make_ring(tmp_path / str(ranges), records, per_file=3, ranges=ranges)
        assert notes["pairs_in_both_orders"] == 1


@pytest.mark.slow
def test_four_times_the_rows_need_no_more_memory_to_sort_pair_and_lay_out(new_folder, monkeypatch):
    monkeypatch.setattr(shards, "ROWS_PER_GROUP", 256)
    monkeypatch.setattr(kl_partners, "SPAN", 256)
    # The lower of two: now and then the interpreter makes room for its own tables.
    small, large = (
        min(peak_of_arranging(new_folder(), rows) for _ in range(2)) for rows in (2_000, 8_000)
    )
    # Most is what one range holds, and the largest of 8 ranges of some 1,000 rows has a few dozen
    # rows more than the larger of two. What grows besides: 24 bytes for a block of some 64 prompts,
    # one number for a unit, 150 bytes for a batch of the ring.
    assert large <= 1.1 * small, (small, large)


def peak_of_arranging(folder, rows):
    """Bytes allocated at most, after the rows have been encoded; ranges are of 1,000 rows."""
    ranges = rows // 1000
    files = [
        write_encoded(folder, number, chunks_between(start, min(start + 4000, rows)), ranges)
        for number, start in enumerate(range(0, rows, 4000))
    ]
    tracemalloc.start()
    ring, _ = ring_of_files(folder, files, ranges, num_pairs=2)
    unit_offsets(ring.sizes(), num_pairs=2, rows_per_unit=500, tokens_per_unit=10**6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(ring.rows) == rows
    return peak


def chunks_between(first, last):
    """Encoded rows, some at a time."""
    for start in range(first, last, 200):
        part = [encoded([row], [row, 1], [row, 2], row=row) for row in range(start, start + 200)]
        yield key_rows(part, seed=0, carried=())


def test_of_two_that_make_one_task_the_first_is_kept(tmp_path):
    records = [encoded([row], [row], row=row) for row in range(9)]
    ring, _ = make_ring(tmp_path, records, num_pairs=1)
    before = all_rows(ring), {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    again, _ = make_ring(tmp_path, records, num_pairs=1)
    assert (all_rows(again), {path: path.read_bytes() for path in tmp_path.rglob("*.*")}) == before
    other, _ = make_ring(tmp_path, records[:8], num_pairs=1)  # as another version might make it
    assert all_rows(other) == before[0]
    assert {*tmp_path.glob("arranged/*")} == {
        path for path in before[1] if "arranged" in path.parts
    }
    # A commit that names a missing file is refused by its name.
    (gone,) = tmp_path.glob("arranged/*.arrows")
    gone.unlink()
    with pytest.raises(CorruptionError, match=r"0\.json is damaged: .*arrows, which it names"):
        make_ring(tmp_path, records[:8], num_pairs=1)


def test_drafts_of_dead_processes_go_and_those_of_living_ones_stay(tmp_path):
    place = spool.Spool(tmp_path)
    place.prepare()
    dead = tmp_path / "encoded" / f".00000003.arrows.{'0' * 16}.tmp"
    dead.write_bytes(b"half")
    with spool.new_part(place.encoded(3)) as mine:
        mine.write(b"whole")
        place.forget_encoded()
        (living,) = (tmp_path / "encoded").iterdir()
        assert living != dead
    assert [path.name for path in (tmp_path / "encoded").iterdir()] == [mine.file.name]


RECORDS = [encoded([row], [row, 1], [row, 2], row=row) for row in range(40)]


def read_all(folder):
    """Every byte of a ring that its users may ask for."""
    ring = Ring(Spool(folder), 2)
    sizes = [each.tolist() for each in ring.sizes()]
    rows = plain(ring.rows.read(0, len(ring.rows)))
    return rows, sizes, ring.partners(0, ring.rows.num_completions).tolist()


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_no_flipped_bit_is_read_or_arranged(tmp_path, monkeypatch, count):
    monkeypatch.setattr(shards, "ROWS_PER_GROUP", 7)
    make_ring(tmp_path, RECORDS, num_pairs=2, ranges=3)
    found = (path for path in tmp_path.rglob("*") if path.is_file())
    files = [path for path in found if "encoded" not in path.parts]
    # Some are where only pairing looks.
    places = flips({path: path.stat().st_size for path in files}, count)
    assert noticed(lambda: read_all(tmp_path), places) > 0.8 * count


@pytest.mark.parametrize(
    "kind", ["arranged/*.arrows", "ring-*.arrows", "arranged/*.json", "ring.json"]
)
def test_a_file_that_is_not_whole_or_not_there_is_not_read(tmp_path, kind):
    make_ring(tmp_path, RECORDS, num_pairs=2)
    assert Ring(Spool(tmp_path), 2).is_whole
    (path,) = tmp_path.glob(kind)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises((CorruptionError, StorageError), match=rf"/{path.name}"):
        read_all(tmp_path)
    path.unlink()
    with pytest.raises((CorruptionError, StorageError), match=rf"/{path.name}"):
        read_all(tmp_path)
    assert Ring(Spool(tmp_path), 2).is_whole == (kind == "arranged/*.json")


def test_keys_that_change_while_partners_are_chosen_are_noticed(tmp_path, monkeypatch):
    kept = ring_module.choose_partners

    def meddle(prompts, *others, **more):
        found = kept(prompts, *others, **more)
        prompts[3] ^= np.uint64(1)
        return found

    monkeypatch.setattr(ring_module, "choose_partners", meddle)
    with pytest.raises(CorruptionError, match=r"/keys\.bin is damaged"):
        make_ring(tmp_path, RECORDS, num_pairs=1)
    assert not Ring(Spool(tmp_path), 1).is_whole


def test_room_for_the_keys_is_taken_before_they_are_mapped_and_given_back(tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refused = pytest.raises(StorageError, match=r"/keys\.bin")
    with mock.patch.object(os, "posix_fallocate", full), refused:
        make_ring(tmp_path / "full", RECORDS, num_pairs=1)
    assert not Ring(Spool(tmp_path / "full"), 1).is_whole
    folder = tmp_path / "map"
    folder.mkdir()
    with new_map(folder / "keys", 1 << 20) as mapped:
        (file,) = folder.iterdir()
        assert file.stat().st_blocks * 512 >= 1 << 20
        mapped[5] = 7
        assert file.read_bytes()[:7] == bytes([0, 0, 0, 0, 0, 7, 0])
    assert not list(folder.iterdir())
