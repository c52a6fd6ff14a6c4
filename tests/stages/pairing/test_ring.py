"""The ring depends on what the rows hold, and on nothing else."""

import json
import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from align.schemas.config import TokenOptions
from align.schemas.row_keys import EncodedChunk, Intake, key_rows
from align.stages.data.data_schema import common_shape
from align.stages.data.encode_workers import EncodingJob, encode_chunks
from align.stages.data.input_files import iter_chunks, open_inputs
from align.stages.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from align.stages.demo.preferences import draw_preferences, transcript
from align.stages.pairing import kl_partners
from align.stages.pairing import sorted_rows as module
from align.stages.pairing.sorted_rows import collect_runs
from align.stages.pairing.units import unit_offsets
from align.stages.storage import shards
from support.encoded_rows import all_rows, encoded, make_ring, record_lists, ring_of_runs

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
def test_order_chunks_runs_and_merges_leave_no_trace(new_folder, records, shuffler, data):
    options = {"carried": ("weight",)}
    expected = [content(row) for row in all_rows(make_ring(new_folder(), records, **options)[0])]
    shuffled = records[:]
    shuffler.shuffle(shuffled)
    chunk = data.draw(st.integers(1, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOKENS_PER_RUN", data.draw(st.sampled_from([1, 60, 10**6])))
        patch.setattr(module, "TOKENS_PER_MERGE", data.draw(st.sampled_from([1, 60, 10**6])))
        ring, intake = make_ring(new_folder(), shuffled, chunk=chunk, **options)
    assert [content(row) for row in all_rows(ring)] == expected
    assert intake.rows_in == len(ring.rows) == len(records)


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


@pytest.mark.slow
@relaxed
@given(record_lists(prompts=4), st.sampled_from([1, 10**6]))
def test_rows_of_one_prompt_lie_together_in_the_order_of_their_keys(new_folder, records, tokens):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOKENS_PER_MERGE", tokens)
        rows = all_rows(make_ring(new_folder(), records, chunk=3, carried=("weight",))[0])
    runs = [row.prompt for i, row in enumerate(rows) if not i or rows[i - 1].prompt != row.prompt]
    assert len(runs) == len(set(runs))
    places = [(row.place, row.row_id, row.copy) for row in rows]
    assert places == sorted(places)


@relaxed
@given(record_lists(prompts=2, alphabet=1), st.integers(1, 4))
def test_rows_of_equal_content_are_numbered_from_zero(new_folder, records, chunk):
    ring, intake = make_ring(new_folder(), records, chunk=chunk, carried=("weight",))
    rows = all_rows(ring)
    seen = Counter()
    for row in rows:
        assert row.copy == seen[row.row_id]
        seen[row.row_id] += 1
    assert intake.notes["rows_that_repeat_another_row"] == len(rows) - len(seen)


def test_three_equal_rows_are_copies_0_1_2_in_input_order(tmp_path):
    twins = [encoded([5], [6], row=row) for row in range(3)]
    rows = all_rows(make_ring(tmp_path, [*twins, encoded([5], [7], row=3)], chunk=1)[0])
    assert [(row.copy, row.source[1]) for row in rows if row.source[1] < 3] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]


@pytest.mark.slow
def test_small_runs_and_merges_really_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_PER_RUN", 1)
    monkeypatch.setattr(module, "TOKENS_PER_MERGE", 1)
    calls = Counter()
    kept = module.KeyedRows.in_ring_order

    def counted(keyed):
        calls["sorted"] += 1
        return kept(keyed)

    monkeypatch.setattr(module.KeyedRows, "in_ring_order", counted)
    records = [encoded([prompt], [prompt]) for prompt in range(40)]
    make_ring(tmp_path, records, chunk=1)
    assert calls["sorted"] > 40 + 10  # each run once, then more than a few ranges
    assert not list(tmp_path.glob("run-*"))


def test_the_seed_reorders_the_ring(tmp_path):
    records = [encoded([prompt], [prompt], row=prompt) for prompt in range(30)]
    orders = [
        [row.source[1] for row in all_rows(make_ring(tmp_path / str(seed), records, seed=seed)[0])]
        for seed in (0, 1)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(30))
    assert orders[0] != orders[1] != list(range(30))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Paired rows, of which some repeat another and one cannot be used."""
    rows = [
        {
            "prompt": transcript(each.prompt),
            "chosen": each.chosen.text,
            "rejected": each.rejected.text,
        }
        for each in draw_preferences(60, seed=5)
    ]
    rows += [*rows[:6], {"prompt": "x", "chosen": "", "rejected": "y"}]
    random.Random(0).shuffle(rows)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ring_of_files(folder, files, model, *, workers, rows_per_chunk):
    inputs = open_inputs([str(file) for file in files])
    shape = common_shape(inputs, {})
    options = TokenOptions(max_length=1024)
    names = tokenizer_fingerprint(load_tokenizer(model, options))
    files = tuple(range(len(inputs)))
    job = EncodingJob(model, options, shape, seed=0, files=files, tokenizer=names)
    chunks = iter_chunks(inputs, shape.columns, rows_per_chunk=rows_per_chunk)
    intake = Intake()
    folder.mkdir()
    runs = collect_runs(folder, encode_chunks(chunks, job, num_workers=workers), intake)
    return ring_of_runs(folder, runs, intake, num_pairs=2), intake


@pytest.mark.parametrize(("workers", "rows_per_chunk"), [(0, 7), (1, 13), (2, 5)])
def test_worker_processes_leave_no_trace(
    file, tokenizer_folder, tmp_path, workers, rows_per_chunk, monkeypatch
):
    options = {"workers": 0, "rows_per_chunk": 1000}
    first, counts = ring_of_files(tmp_path / "a", [file], tokenizer_folder, **options)
    monkeypatch.setattr(module, "TOKENS_PER_RUN", 1500)
    monkeypatch.setattr(module, "TOKENS_PER_MERGE", 700)
    options = {"workers": workers, "rows_per_chunk": rows_per_chunk}
    second, others = ring_of_files(tmp_path / "b", [file], tokenizer_folder, **options)
    assert all_rows(first) == all_rows(second)
    assert partners_of(first) == partners_of(second)
    assert (counts.rows_in, counts.reasons, counts.rejected) == (
        67,
        {"empty_completion": 1},
        others.rejected,
    )
    assert +counts.notes == +others.notes
    assert len(first.rows) == len(second.rows) == 66


def partners_of(ring):
    return ring.partners(0, ring.rows.num_completions).tolist()


def test_the_order_of_files_moves_nothing_but_the_sources(file, tokenizer_folder, tmp_path):
    lines = file.read_text().splitlines(keepends=True)
    (tmp_path / "one.jsonl").write_text("".join(lines[:20]))
    (tmp_path / "two.jsonl").write_text("".join(lines[20:]))
    names = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    options = {"workers": 0, "rows_per_chunk": 9}
    rings = [
        ring_of_files(tmp_path / str(index), files, tokenizer_folder, **options)[0]
        for index, files in enumerate((names, names[::-1]))
    ]
    there, back = ([content(row) for row in all_rows(ring)] for ring in rings)
    assert there == back
    assert partners_of(rings[0]) == partners_of(rings[1])


@pytest.mark.slow
def test_ten_times_the_rows_need_no_more_memory_to_merge_pair_and_lay_out(new_folder, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_PER_RUN", 400_000)
    monkeypatch.setattr(module, "TOKENS_PER_MERGE", 20_000)
    monkeypatch.setattr(shards, "ROWS_PER_GROUP", 256)
    monkeypatch.setattr(kl_partners, "SPAN", 256)
    # The lower of two: now and then the interpreter makes room for its own tables.
    small, large = (
        min(peak_of_merging(new_folder(), rows) for _ in range(2)) for rows in (2_000, 20_000)
    )
    # A row with its keys and partners takes 200 bytes. What grows: 24 bytes for a block of some 64
    # prompts, one number for a unit, 130 bytes for a batch of the ring and of its runs, and some
    # kilobytes for what a sorted run gives to the range that is merged.
    assert large - small <= 4 * (20_000 - 2_000), (small, large)


def peak_of_merging(folder, rows):
    """Bytes allocated at most, after the sorted runs have been written."""
    chunks = (
        EncodedChunk(
            0,
            key_rows([encoded([row], [row, 1], [row, 2]) for row in part], seed=0, carried=()),
            [],
            {},
        )
        for part in (range(start, start + 200) for start in range(0, rows, 200))
    )
    runs = collect_runs(folder, chunks, Intake())
    tracemalloc.start()
    ring = ring_of_runs(folder, runs, Intake(), num_pairs=2)
    unit_offsets(ring.rows, num_pairs=2, rows_per_unit=500, tokens_per_unit=10**6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(ring.rows) == rows
    return peak
