"""Files of every format become the same rows, in order, in chunks and slices of a bounded size."""

import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import FingerprintError
from align.stages.data import input_files, json_files
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.input_files import (
    InputFile,
    data_bytes,
    digested,
    iter_chunks,
    iter_slice,
    open_inputs,
    require_unchanged,
    slices_of,
)
from align.stages.data.json_files import json_rows
from support.patience import PATIENCE
from support.read_rows import write_rows

PAIRS = [
    {"prompt": "Say hi", "chosen": "Hello,\nyou", "rejected": 'a "quoted" word'},
    {"prompt": "Grüße?", "chosen": "Servus 👋", "rejected": " no "},
    {"prompt": "2+2", "chosen": "4", "rejected": "5"},
] * 5


def table_of(rows, kind):
    schema = kind and pa.schema([(name, kind) for name in rows[0]])
    return pa.Table.from_pylist(rows, schema)


def parquet(path, rows, kind=None):
    pq.write_table(table_of(rows, kind), path, row_group_size=4)


def arrow(path, rows, kind=None, opener=pa.ipc.new_file):
    with opener(str(path), table_of(rows, kind).schema) as writer:
        writer.write_table(table_of(rows, kind), max_chunksize=4)


def messy_lines(path, rows):
    lines = "\r\n \r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n\r\n")


def indented_array(path, rows):
    path.write_text("\n " + json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")


def csv_with_mark(path, rows):
    path.write_bytes(b"\xef\xbb\xbf" + Path(write_rows(path, rows)).read_bytes())


WRITERS = {
    "a.parquet": parquet,
    "dictionary.parquet": lambda *to: parquet(*to, pa.dictionary(pa.int32(), pa.string())),
    "large.parquet": lambda *to: parquet(*to, pa.large_string()),
    "file.arrow": arrow,
    "stream.arrow": lambda *to: arrow(*to, opener=pa.ipc.new_stream),
    "view.feather": lambda *to: arrow(*to, pa.string_view()),
    "lines.json": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows))),
    "messy.jsonl": messy_lines,
    "array.json": indented_array,
    "a.csv": csv_with_mark,
    "packed.jsonl.gz": lambda path, rows: path.write_bytes(
        gzip.compress("\n".join(map(json.dumps, rows)).encode())
    ),
}


def read_all(*paths, rows_per_chunk=4):
    """The records of files."""
    inputs = open_inputs(list(map(str, paths)))
    shape = common_shape(inputs, {})
    records = []
    for chunk in iter_chunks(inputs, shape.columns, rows_per_chunk=rows_per_chunk):
        good, bad = parse_chunk(chunk, shape)
        assert (bad, len(good)) == ([], len(chunk))
        records += good
    return records


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_records_file_after_file(tmp_path, name):
    WRITERS[name](tmp_path / name, PAIRS)
    write_rows(tmp_path / "next.jsonl", PAIRS)
    records = read_all(tmp_path / name, tmp_path / "next.jsonl")
    assert [(one.file, one.row) for one in records] == [(f, r) for f in (0, 1) for r in range(15)]
    for record, row in zip(records, PAIRS * 2, strict=True):
        assert record.prompt == row["prompt"]
        assert record.completions == (row["chosen"], row["rejected"])


@pytest.mark.parametrize("name", WRITERS)
def test_a_chunk_holds_few_bytes_of_the_columns_that_are_needed(tmp_path, name):
    row = {"prompt": "p", "chosen": "c" * 1000, "rejected": "r" * 1000, "image": "x" * 20_000}
    WRITERS[name](tmp_path / name, [row | {"prompt": f"{i}"} for i in range(50)])
    inputs = open_inputs([str(tmp_path / name)])
    columns = ("prompt", "chosen", "rejected")
    chunks = list(iter_chunks(inputs, columns, bytes_per_chunk=10_000))
    assert sum(map(len, chunks)) == 50
    assert max(map(len, chunks)) <= 5
    if name.endswith(("parquet", "arrow", "feather")):  # others are parsed where they are sent to
        assert max(chunk.payload.batch.nbytes for chunk in chunks) < 12_000


def test_elements_of_an_array_may_be_longer_than_the_buffer_or_cut_by_it_anywhere(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(json_files, "BLOCK_BYTES", 1 << 10)
    path = tmp_path / "a.json"
    rows = [{"prompt": "ü" * n, "chosen": "a", "rejected": "b"} for n in (3 << 10, 5, 1 << 10)]
    indented_array(path, rows)
    assert [record.prompt for record in read_all(path)] == [row["prompt"] for row in rows]
    element = {"prompt": 'é\\"\u00e9', "chosen": [1234567890, True, None, -1.5e10], "rejected": {}}
    text = json.dumps([element, 12345] * 4, ensure_ascii=False)
    for before in range(120):
        path.write_text(" " * ((1 << 10) - before) + text, encoding="utf-8")
        assert list(map(json.loads, json_rows(path))) == [element, 12345] * 4, before


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_a_line_belongs_to_the_stretch_in_which_it_begins_wherever_it_is_cut(tmp_path, start):
    path = tmp_path / "a.jsonl"
    path.write_bytes(start + b'{"a":1}\n\n{"a":22}\r\n \n{"a":333}')
    whole = [b'{"a":1}\n', b'{"a":22}\r\n', b'{"a":333}']
    assert list(json_rows(path)) == whole
    begins = [0, len(start) + 9, len(start) + 21]
    for cut in range(4, path.stat().st_size):
        first, second = list(json_rows(path, stop=cut)), list(json_rows(path, start=cut))
        assert first + second == whole
        assert len(first) == sum(begin < cut for begin in begins)


@pytest.mark.parametrize("name", WRITERS)
def test_slices_hold_every_row_once_and_count_from_their_stretch(tmp_path, monkeypatch, name):
    monkeypatch.setattr(input_files, "SLICES", 10**6)
    rows = [{"prompt": f"{i:03}", "chosen": "c" * 20, "rejected": "r"} for i in range(60)]
    WRITERS[name](tmp_path / name, rows)
    inputs = open_inputs([str(tmp_path / name)])
    shape = common_shape(inputs, {})
    for most in (60, 400):
        monkeypatch.setattr(input_files, "LEAST_SLICE", most)
        found, starts = rows_of_slices(inputs, shape)
        assert sorted(found) == [(row, f"{row:03}") for row in range(60)], most
        assert (len(starts) > 3) == (name not in {"array.json", "a.csv", "packed.jsonl.gz"})


def rows_of_slices(inputs, shape):
    """The own rows of all slices with their places in the file, and where each stretch begins."""
    found, starts, passed = [], {}, 0
    for part in slices_of(inputs, shape.columns, total=data_bytes(inputs, shape.columns)):
        chunks = list(iter_slice(inputs, part, shape.columns))
        if part.file_range not in starts:
            starts[part.file_range] = passed
            passed += sum(len(chunk) for chunk, _ in chunks)
        for chunk in (chunk for chunk, is_own in chunks if is_own):
            records, _ = parse_chunk(chunk, shape)
            found += [(starts[part.file_range] + one.row, one.prompt) for one in records]
    return found, starts


def _rewritten(path):
    path.write_bytes(path.read_bytes())


def _exchanged(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"{", b" "))
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("change", [_rewritten, _exchanged, Path.unlink])
def test_a_file_that_changed_after_it_was_digested_is_refused_by_name(tmp_path, change):
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    inputs = (InputFile(path, ".jsonl", 3),)
    before = tuple(map(digested, inputs))
    assert (before[0].bytes, before[0].sha256) == (3, hashlib.sha256(b"{}\n").hexdigest())
    require_unchanged(inputs, before)
    change(path)
    with pytest.raises(FingerprintError, match=r"a\.jsonl changed while it was read: "):
        require_unchanged(inputs, before)


MEGABYTES = 80
SCAN = """
import sys
from pathlib import Path
from align.stages.data.input_files import iter_chunks, open_inputs
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.data_schema import common_shape

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

for path in sys.argv[1:]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, rows, inputs = peak(), 0, open_inputs([path])
    shape = common_shape(inputs, {})
    for chunk in iter_chunks(inputs, shape.columns):
        rows += len(parse_chunk(chunk, shape)[0])
    print(rows, (peak() - before) // 1024)
"""


def drawn_rows(megabytes, characters):
    noise = random.Random(0).randbytes(characters).hex()
    for number in range(megabytes * (1 << 20) // (2 * characters)):
        at = number % characters
        yield {"prompt": f"{number}", "chosen": noise[at:] + noise[:at], "rejected": "no"}


def test_a_large_file_needs_no_more_memory_than_a_few_chunks(tmp_path):
    kinds, paths = {"json": 1 << 19, "jsonl": 1000, "csv": 1 << 19, "parquet": 1000}, []
    for ending, characters in kinds.items():
        for megabytes in (2, MEGABYTES):  # the first pays for what is imported
            paths.append(tmp_path / f"{megabytes}.{ending}")
            # One row group, as large defaults leave it, in small pages: a page is read as a whole.
            one_group = {"row_group_size": 1 << 20, "use_dictionary": False, "write_batch_size": 1}
            write_rows(paths[-1], list(drawn_rows(megabytes, characters)), **one_group)
    command = [sys.executable, "-c", SCAN, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    for line, (ending, characters) in zip(
        done.stdout.splitlines()[1::2], kinds.items(), strict=True
    ):
        scanned, megabytes = map(int, line.split())
        assert scanned == MEGABYTES * (1 << 20) // (2 * characters)
        assert megabytes < 64, ending
