"""Damaged data files: the same rows, rejected rows, or one error of ours that names the file."""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.errors import AlignError
from support.read_files import read_in_slices

ROWS = [
    {"prompt": f'{i}. why "é", {i}?', "chosen": f"good ✓ {i}", "rejected": "bad " * (1 + i % 3)}
    for i in range(12)
]
TEXTS = [tuple(row.values()) for row in ROWS]
BAD = 7  # the row that cannot be used in a file of which one row is bad


def parquet(rows):
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=5, write_page_checksum=True)
    return sink.getvalue()


def arrow(rows):
    sink, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return sink.getvalue()


def lines(rows):
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def array(rows):
    return json.dumps(rows, ensure_ascii=False, indent=1).encode()


def commas(rows):
    cells = [ROWS[0].keys(), *(row.values() for row in rows)]
    quoted = [['"{}"'.format((one or "").replace('"', '""')) for one in row] for row in cells]
    return "".join(f"{','.join(row)}\n" for row in quoted).encode()


FORMATS = {
    "a.parquet": parquet,
    "a.arrow": arrow,
    "a.jsonl": lines,
    "a.jsonl.gz": lambda rows: gzip.compress(lines(rows), mtime=0),
    "a.json": array,
    "a.csv": commas,
}
WHOLE = {name: write(ROWS) for name, write in FORMATS.items()}
# One text is null there, which CSV has as an empty cell.
WITH_A_BAD_ROW = {
    name: write([{**row, "chosen": None} if i == BAD else row for i, row in enumerate(ROWS)])
    for name, write in FORMATS.items()
}
PLACES = st.integers(0, 10**6)
DRAWN = settings(derandomize=True, max_examples=40)
every_format = pytest.mark.parametrize("name", FORMATS)
every_text = pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])


def read(folder, name, content):
    """The texts of the rows by their numbers, and the numbers of the rejected; None if refused."""
    path = folder / name
    path.write_bytes(content)
    refused = ""
    try:
        records, rejected = read_in_slices(path)
    except AlignError as error:
        refused = str(error)
    if refused:
        assert name in refused
        return None
    texts = {one.row: (one.prompt, *one.completions) for one in records}
    return texts, [one.row for one in rejected]


SAME = (dict(enumerate(TEXTS)), [])


@every_format
def test_an_undamaged_file_is_read_whole(tmp_path, name):
    assert read(tmp_path, name, WHOLE[name]) == SAME


@every_format
def test_a_bad_row_is_rejected_alone(tmp_path, name):
    texts = {row: text for row, text in enumerate(TEXTS) if row != BAD}
    assert read(tmp_path, name, WITH_A_BAD_ROW[name]) == (texts, [BAD])


@every_format
def test_an_empty_file_is_refused(tmp_path, name):
    assert read(tmp_path, name, b"") is None


@every_text
def test_a_byte_order_mark_changes_nothing(tmp_path, name):
    assert read(tmp_path, name, b"\xef\xbb\xbf" + WHOLE[name]) == SAME


@every_text
def test_line_ends_of_windows_change_nothing(tmp_path, name):
    assert read(tmp_path, name, WHOLE[name].replace(b"\n", b"\r\n")) == SAME


@every_format
@DRAWN
@given(place=PLACES)
def test_a_cut_file_is_refused_or_read_up_to_the_cut(tmp_path, name, place):
    found = read(tmp_path, name, WHOLE[name][: place % len(WHOLE[name])])
    if found is not None:
        texts, rejected = found
        assert texts == dict(enumerate(TEXTS[: len(texts)]))
        assert rejected in ([], [len(texts)])
        assert name in {"a.jsonl", "a.csv", "a.arrow"}  # the others say how long they are


@every_format
@DRAWN
@given(place=PLACES, bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_where_there_are_checksums(tmp_path, name, place, bit):
    content = bytearray(WHOLE[name])
    # A footer of Parquet has no checksum: what comes of it is compared nowhere.
    end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[place % (end if name == "a.parquet" else len(content))] ^= 1 << bit
    found = read(tmp_path, name, bytes(content))
    if found is not None and name in {"a.parquet", "a.jsonl.gz"}:
        assert found == SAME
    elif found is not None and name == "a.jsonl":
        wrong = {*TEXTS} - {*found[0].values()}
        assert len(wrong) <= 2  # a line, or two that became one
