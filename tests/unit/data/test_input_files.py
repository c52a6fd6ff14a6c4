"""Files of every format become the same rows, in order, whole and in slices."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from align.schemas.errors import FingerprintError
from align.stages.data import files
from align.stages.data.columns import common_shape
from align.stages.data.files import (
    InputFile,
    digested,
    open_inputs,
    require_unchanged,
    rows_of,
    slices_of,
)
from align.stages.data.readers import FilePart
from align.stages.data.text_rows import read_text_rows, text_rows_in
from support.data_files import array, arrow, gzipped, lines, parquet, separated, zstd
from support.patience import PATIENCE
from support.read_rows import parted, write_rows

PAIRS = [
    {"prompt": "Say; hi", "chosen": 'Hello,\n"you"', "rejected": "5\t"},
    {"prompt": "Grüße?", "chosen": "Servus 👋", "rejected": " no "},
    {"prompt": "2+2", "chosen": "4", "rejected": "[1, 2"},
] * 5


def messy_lines(rows):
    own = "\r\n \r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return b"\xef\xbb\xbf" + own.encode() + b"\r\n\r\n"


def named(rows):
    """An array in an object, in which an array stands before it and a number."""
    inside = [{**row, "id": index} for index, row in enumerate(rows)]
    return b'{"version": "1.1", "rows": 3,\n "data" : ' + array(inside) + b"\n}\n"


CUTTABLE = {
    "a.parquet": parquet,
    "dictionary.parquet": lambda rows: parquet(rows, pa.dictionary(pa.int32(), pa.string())),
    "large.parquet": lambda rows: parquet(rows, pa.large_string()),
    "file.arrow": lambda rows: arrow(rows, opener=pa.ipc.new_file),
    "stream.arrow": arrow,
    "view.feather": lambda rows: arrow(rows, pa.string_view(), pa.ipc.new_file),
    "lines.json": lines,
    "messy.jsonl": messy_lines,
}
FILES = (
    CUTTABLE
    | {
        "a.jsonl.gz": lambda rows: gzipped(lines(rows)),
        "A.JSONL.GZ": lambda rows: (
            gzipped(lines(rows)[:40]) + gzipped(lines(rows)[40:])
        ),  # as `cat`
        "a.jsonl.zst": lambda rows: zstd(lines(rows)),
        "a.ndjson.zst": lambda rows: zstd(lines(rows)[:40]) + zstd(lines(rows)[40:]),
        "array.json": lambda rows: b"\n " + array(rows),
        "a.json.gz": lambda rows: gzipped(b"\xef\xbb\xbf" + array(rows)),
        "named.json": named,
        "named.json.zst": lambda rows: zstd(b"\xef\xbb\xbf" + named(rows)),
        "a.csv": separated,
        "a.tsv": lambda rows: separated(rows, "\t"),
        "semicolons.csv": lambda rows: separated(rows, ";"),
        "mark.csv": lambda rows: separated(rows, ";", b"\xef\xbb\xbf"),
        "tabs.csv": lambda rows: separated(rows, "\t"),
        "a.csv.gz": lambda rows: gzipped(separated(rows, ";")),
        "a.tsv.zst": lambda rows: zstd(separated(rows, "\t")),
    }
)


def read_all(*paths):
    """The records of files."""
    inputs = open_inputs(list(map(str, paths)))
    records, rejected = parted(read_text_rows(inputs, common_shape(inputs, {})))
    assert not rejected
    return records


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_records_file_after_file(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name](PAIRS))
    write_rows(tmp_path / "next.jsonl", PAIRS)
    records = read_all(tmp_path / name, tmp_path / "next.jsonl")
    assert [(one.file, one.row) for one in records] == [(f, r) for f in (0, 1) for r in range(15)]
    for record, row in zip(records, PAIRS * 2, strict=True):
        assert record.prompt == row["prompt"]
        assert record.completions == (row["chosen"], row["rejected"])


def test_lines_that_begin_with_an_array_named_data_are_lines(tmp_path):
    rows = [{"data": [{"role": "user", "content": "Hi?"}], "chosen": "a", "rejected": "b"}] * 2
    inputs = open_inputs([write_rows(tmp_path / "a.jsonl", rows)])
    shape = common_shape(inputs, {"prompt": "data"})
    assert [one.prompt for one in read_text_rows(inputs, shape)] == [tuple(rows[0]["data"])] * 2


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_a_line_belongs_to_the_slice_in_which_it_begins(tmp_path, start):
    path = tmp_path / "a.jsonl"
    path.write_bytes(start + b'{"a":1}\n\n{"a":22}\r\n \n{"a":333}')
    (file,) = open_inputs([str(path)])
    whole = [{"a": 1}, {"a": 22}, {"a": 333}]
    assert list(rows_of(file, ())) == whole
    begins = [0, len(start) + 9, len(start) + 21]
    for cut in range(4, file.bytes):
        parts = FilePart(0, cut, 0), FilePart(cut, file.bytes, 0)
        first, second = (list(rows_of(file, (), part)) for part in parts)
        assert first + second == whole
        assert len(first) == sum(begin < cut for begin in begins)


@pytest.mark.parametrize("name", FILES)
def test_slices_hold_every_row_once_in_order(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files, "SLICES", 10**6)
    rows = [{"prompt": f"{i:03}", "chosen": "c" * 20, "rejected": "r"} for i in range(60)]
    (tmp_path / name).write_bytes(FILES[name](rows))
    inputs = open_inputs([str(tmp_path / name)])
    shape = common_shape(inputs, {})
    for most in (60, 400):
        monkeypatch.setattr(files, "LEAST_SLICE", most)
        slices = slices_of(inputs, shape.columns)
        found = [[*text_rows_in(inputs[0], shape, 0, part)] for (part,) in slices]
        assert [one.prompt for each in found for one in each] == [row["prompt"] for row in rows]
        assert all([one.row for one in each] == list(range(len(each))) for each in found)
        assert (len(slices) > 3) == (name in CUTTABLE)


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
    with pytest.raises(FingerprintError, match=r"a\.jsonl"):
        require_unchanged(inputs, before)


MEGABYTES = 80
SCAN = """
import sys
from pathlib import Path
from align.schemas.rows import TextRow
from align.stages.data.columns import common_shape
from align.stages.data.files import open_inputs
from align.stages.data.text_rows import in_batches, read_text_rows

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

for path in sys.argv[1:]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, rows, inputs = peak(), 0, open_inputs([path])
    shape = common_shape(inputs, {})
    for batch in in_batches(read_text_rows(inputs, shape)):
        rows += sum(isinstance(one, TextRow) for one in batch)
    print(rows, (peak() - before) // 1024)
"""


def drawn_rows(megabytes, characters):
    noise = random.Random(0).randbytes(characters).hex()
    for number in range(megabytes * (1 << 20) // (2 * characters)):
        at = number % characters
        yield {"prompt": f"{number}", "chosen": noise[at:] + noise[:at], "rejected": "no"}


def test_a_large_file_needs_no_more_memory_than_a_few_batches(tmp_path):
    kinds, paths = {"jsonl": 1 << 19, "csv": 1 << 19, "parquet": 4000}, []
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
