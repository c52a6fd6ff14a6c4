"""A row that holds too much goes to quarantine alone, and no small file fills the memory."""

import csv
import gzip
import io
import json
import multiprocessing
import random
from functools import partial
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from campaigns import large_data

from align.stages.data.arrow_batches import joined
from align.stages.data.csv_files import csv_rows
from align.stages.data.json_files import json_rows
from align.stages.data.large_rows import LongRow, is_light, row_sizes
from support.flips import SEED
from support.patience import PATIENCE
from support.peaks import read_measured
from support.read_files import read_in_slices

CHILDREN = multiprocessing.get_context("forkserver")
MIB = 1 << 20
MB = 1_000_000
STRING = pa.string()
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
PROMPTS = ["a", "b" * 3000, "c", "d" * 2500, "e\n" * 1200, "f"]
ROWS = [{"prompt": one, "chosen": "good", "rejected": "bad"} for one in PROMPTS]
SMALL, LARGE = [0, 2, 5], [1, 3, 4]  # under a bound of 2,048 bytes, but for the text of JSON


def as_csv(mark):
    sink = io.StringIO()
    writer = csv.writer(sink, delimiter=mark)
    writer.writerows([ROWS[0].keys(), *(row.values() for row in ROWS)])
    return sink.getvalue()


def write_text(text, path):
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_table(path, kind=STRING, **options):
    table = pa.table({name: pa.array([row[name] for row in ROWS], kind) for name in ROWS[0]})
    if path.suffix == ".parquet":
        pq.write_table(table, path, **options)
        return
    opener = pa.ipc.new_file if path.suffix == ".feather" else pa.ipc.new_stream
    with opener(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)


LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)
DICTIONARY = pa.dictionary(pa.int32(), pa.string())
WRITERS = {
    "a.jsonl": partial(write_text, LINES),
    "a.jsonl.gz": partial(write_text, LINES),
    "a.json": partial(write_text, json.dumps(ROWS)),
    "data.json": partial(write_text, json.dumps({"data": ROWS})),
    "a.csv": partial(write_text, as_csv(",")),
    "a.tsv.gz": partial(write_text, as_csv("\t")),
    "a.parquet": write_table,
    "plain.parquet": partial(write_table, use_dictionary=False, compression="none"),
    "second.parquet": partial(write_table, data_page_version="2.0", compression="zstd"),
    "deltas.parquet": partial(
        write_table, use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY"
    ),
    "a.arrow": write_table,
    "views.arrow": partial(write_table, kind=pa.string_view()),
    "dictionaries.arrow": partial(write_table, kind=DICTIONARY),
    "a.feather": partial(write_table, compression="zstd"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_over_the_bound_are_in_quarantine_by_number_and_size_and_the_others_used(
    tmp_path, name
):
    path = tmp_path / name
    WRITERS[name](path)
    records, rejected = read_in_slices(path, max_cell_mib=2048 / MIB)
    assert [(one.row, one.prompt) for one in records] == [(row, PROMPTS[row]) for row in SMALL]
    assert [(one.row, one.reason) for one in rejected] == [(row, "too_large") for row in LARGE]
    assert all("MiB, more than data.max_cell_mib=" in one.detail for one in rejected)
    assert len(read_in_slices(path)[0]) == len(ROWS)


def weighed(value):
    """The bytes of a value in plain words: texts by their length, and 16 more in a list."""
    if isinstance(value, list):
        return sum(weighed(one) + 16 for one in value)
    if isinstance(value, dict):
        return sum(map(weighed, value.values()))
    return len((value or "").encode())


def drawn(kind, draw):
    if pa.types.is_struct(kind):
        return {field.name: drawn(field.type, draw) for field in kind}
    if pa.types.is_nested(kind) and not pa.types.is_run_end_encoded(kind):
        return [drawn(kind.value_type, draw) for _ in range(draw.randrange(4))]
    return draw.choice(["", "é", "some text", "x" * 40])


KINDS = {
    "string": pa.string(),
    "large": pa.large_string(),
    "view": pa.string_view(),
    "dictionary": DICTIONARY,
    "list": pa.list_(MESSAGE),
    "large list": pa.large_list(MESSAGE),
    "list view": pa.list_view(MESSAGE),
    "lists of lists": pa.list_(pa.list_(pa.string())),
    "struct": MESSAGE,
}


@pytest.mark.parametrize("name", KINDS)
def test_the_size_of_a_row_is_that_of_its_values_wherever_they_are_kept(name):
    draw = random.Random(SEED)
    cells = [drawn(KINDS[name], draw) for _ in range(50)]
    batch = pa.record_batch({"a": pa.array(cells, KINDS[name])})
    for part in (batch, batch.slice(7, 30), batch.slice(49), batch.slice(3, 0)):
        expected = [weighed(one) for one in part.column(0).to_pylist()]
        assert row_sizes(part).tolist() == expected
        for most in (0, sum(expected) - 1, sum(expected), 10**6):
            assert sum(expected) <= most or not is_light(part, most)
    plain = pa.record_batch({"a": pa.array(cells)})
    assert is_light(plain, 10 * plain.nbytes)  # so that ordinary rows are not looked at


@pytest.mark.parametrize("seed", range(10))
def test_batches_that_are_decoded_in_parts_are_those_that_are_decoded_whole(seed):
    draw = random.Random(seed)
    whole = pa.record_batch({"a": [drawn(MESSAGE, draw) for _ in range(100)]})
    rows = draw.randrange(1, 130)
    few = draw.randrange(1, rows + 1)
    parts = [whole.slice(start, few) for start in range(0, 100, few)]
    found = [*joined(parts, rows)]
    least = [min(rows, 100 - done) for done in range(0, 100, rows)]
    assert [len(one) for one in found] == least
    assert pa.Table.from_batches(found) == pa.Table.from_batches([whole])


def test_parts_that_hold_much_are_not_joined():
    large = pa.record_batch({"a": ["x" * (40 * MIB)]})
    assert [len(one) for one in joined([large] * 5, 100)] == [2, 2, 1]


def test_runs_count_in_every_row_that_they_cover():
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([3, 5], pa.int32()), ["aaaa", "b"])
    batch = pa.record_batch({"a": runs})
    assert row_sizes(batch).tolist() == [4, 4, 4, 1, 1]
    assert row_sizes(batch.slice(2, 2)).tolist() == [4, 1]


@pytest.mark.parametrize("seed", range(30))
def test_csv_goes_on_at_the_next_row_after_one_that_is_passed_over(tmp_path, seed):
    draw = random.Random(f"{SEED} {seed}")
    pieces = ["a", '"', ",", "\n", "\r\n", "some words", 'a "quote"', ",,", "é"]
    rows = [
        ["".join(draw.choices(pieces, k=draw.choice((1, 3, 60)))) for _ in range(3)]
        for _ in range(20)
    ]
    quoting = draw.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=quoting).writerows([["p", "q", "r"], *rows])
    found = list(csv_rows(tmp_path / "a.csv", 150))[1:]
    assert len(found) == len(rows)
    for row, one in zip(rows, found, strict=True):
        assert one == row or (isinstance(one, LongRow) and one.bytes > 150), row
    assert any(isinstance(one, LongRow) for one in found)


@pytest.mark.parametrize("seed", range(20))
def test_an_array_goes_on_at_the_next_element_after_one_that_is_passed_over(tmp_path, seed):
    draw = random.Random(f"{SEED} {seed}")
    texts = ['"', "\\", "{", "]", ",", "é", "\\u0041", "words " * 400_000]
    values = [["".join(draw.choices(texts, k=3)), {"a": [[], {}, 1.5]}] for _ in range(5)]
    (tmp_path / "a.json").write_text(json.dumps(values), encoding="utf-8")
    found = list(json_rows(tmp_path / "a.json", most=1000))
    sizes = [len(json.dumps(value)) for value in values]
    for value, size, one in zip(values, sizes, found, strict=True):
        expected = LongRow(size) if size > 1000 else json.dumps(value).encode()
        assert one == expected


def test_a_line_that_reaches_over_many_ranges_is_one_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 5000 + b'\n{"a": 2}\n')
    edges = [*range(0, path.stat().st_size, 700), path.stat().st_size]
    found = [
        row
        for start, stop in pairwise(edges)
        for row in json_rows(path, start=start, stop=stop, most=1000)
    ]
    assert found == [b'{"a": 1}\n', LongRow(5001), b'{"a": 2}\n']


LONG = ["huge cell.parquet"]  # which takes long to make
LONG_CASES = [pytest.param(name, marks=pytest.mark.long) for name in LONG]
MEASURED = {
    "one prompt in 100 rows.parquet": (
        partial(large_data.parquet, lambda: large_data.same(DICTIONARY, count=100)),
        (100, 0),
    ),
    "messages.parquet": (
        partial(large_data.parquet, lambda: large_data.pairs(large_data.one_chat(3 * MB))),
        (11, 1),
    ),
    "huge cell.parquet": (
        partial(large_data.parquet, lambda: large_data.pairs(large_data.one_cell(600 * MB))),
        (8, 4),
    ),
    "huge line.jsonl.zst": (partial(large_data.lines, 300 * MB), (11, 1)),
    "huge cell.csv.zst": (partial(large_data.commas, 100 * MB), (11, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * name.endswith("cell.parquet"))
        for name in MEASURED
    ],
)
def test_what_a_small_file_decodes_to_does_not_fill_the_memory(tmp_path, name):
    write, expected = MEASURED[name]
    write(tmp_path / name)
    assert (tmp_path / name).stat().st_size < MIB
    report = CHILDREN.Queue()
    child = CHILDREN.Process(target=read_measured, args=(tmp_path / name, report), daemon=True)
    child.start()
    *counts, peak = report.get(timeout=PATIENCE)
    child.join(PATIENCE)
    assert tuple(counts) == expected
    assert peak < 280
