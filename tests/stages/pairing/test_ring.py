"""The ring depends on what the rows hold, and on nothing else."""

import tracemalloc
from collections import Counter
from itertools import groupby

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from align.schemas.errors import CorruptionError
from align.schemas.row_keys import key_rows
from align.schemas.rows import Role
from align.stages.pairing import key_ranges as module
from align.stages.pairing import kl_partners
from align.stages.pairing.units import unit_offsets
from align.stages.storage import shards, spool
from support.encoded_rows import (
    all_rows,
    encoded,
    make_ring,
    record_lists,
    ring_of_files,
    write_encoded,
)

relaxed = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def content(row):
    """All but where the row came from."""
    return row._replace(source=None)


@pytest.mark.slow
@relaxed
@given(record_lists(with_scores=True), st.randoms(), st.data())
def test_order_chunks_runs_files_and_ranges_leave_no_trace(new_folder, records, shuffler, data):
    options = {"carried": ("weight",)}
    rows = all_rows(make_ring(new_folder(), records, **options)[0])
    prompts = [prompt for prompt, _ in groupby(row.prompt for row in rows)]
    assert len(prompts) == len(set(prompts))  # rows of one lie together
    keys = [(row.place, row.row_id, row.copy) for row in rows]
    assert keys == sorted(keys)
    expected = [content(row) for row in rows]
    shuffled = records[:]
    shuffler.shuffle(shuffled)
    chunk = data.draw(st.integers(1, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOKENS_PER_RUN", data.draw(st.sampled_from([1, 60, 10**6])))
        patch.setattr(module, "TOKENS_PER_MERGE", data.draw(st.sampled_from([1, 60, 10**6])))
        patch.setattr(module, "TOKENS_PER_BATCH_OF_A_RUN", data.draw(st.sampled_from([1, 10**6])))
        options |= {
            "per_file": data.draw(st.integers(1, 30)),
            "ranges": data.draw(st.integers(1, 9)),
        }
        ring, _ = make_ring(new_folder(), shuffled, chunk=chunk, **options)
    assert [content(row) for row in all_rows(ring)] == expected


@relaxed
@given(record_lists(prompts=4))
def test_every_row_is_there_once_and_knows_where_it_came_from(new_folder, records):
    rows = all_rows(make_ring(new_folder(), records, carried=("weight",))[0])
    assert sorted(row.source[1] for row in rows) == list(range(len(records)))
    for row in rows:
        source = records[row.source[1]]
        assert row.prompt == tuple(source.prompt)
        assert [branch[0] for branch in row.branches] == [tuple(ids) for ids in source.completions]
        assert row.carried == (source.record.carried["weight"],)


@relaxed
@given(record_lists(prompts=2, alphabet=1), st.integers(1, 4))
def test_rows_of_equal_content_are_numbered_from_zero(new_folder, records, chunk):
    options = {"chunk": chunk, "per_file": 4, "ranges": 3, "carried": ("weight",)}
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


def test_the_seed_reorders_the_ring(tmp_path):
    records = [encoded([prompt], [prompt], row=prompt) for prompt in range(30)]
    orders = [
        [row.source[1] for row in all_rows(make_ring(tmp_path / str(seed), records, seed=seed)[0])]
        for seed in (0, 1)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(30))
    assert orders[0] != orders[1] != list(range(30))


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
        assert not dead.exists()
        mine.write(b"whole")
        dead.write_bytes(b"half")
        place.forget_encoded()
        (living,) = (tmp_path / "encoded").iterdir()
        assert living != dead
    assert [path.name for path in (tmp_path / "encoded").iterdir()] == [mine.file.name]
