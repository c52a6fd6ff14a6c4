"""Damaged data files: the same rows, rejected rows, or one error of ours that names the file."""

import csv
import struct
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from align.schemas.errors import AlignError, BadDataError
from support.data_files import (
    array,
    arrow,
    gzipped,
    lines,
    parquet,
    read_in_slices,
    separated,
    zstd,
)
from support.flips import flipped
from support.read_rows import write_rows

ROWS = [
    {"prompt": f'{i}. why "é", {i}?', "chosen": f"good ✓ {i}", "rejected": "bad " * (1 + i % 3)}
    for i in range(12)
]
TEXTS = [tuple(row.values()) for row in ROWS]
BAD = 7  # the row that cannot be used in a file of which one row is bad


FORMATS = {
    "a.parquet": parquet,
    "a.arrow": arrow,
    "a.jsonl": lines,
    "a.jsonl.gz": lambda rows: gzipped(lines(rows)),
    "a.jsonl.zst": lambda rows: zstd(lines(rows)),
    "a.json": array,
    "a.csv": separated,
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
def test_a_bad_row_is_rejected_alone(tmp_path, name):
    texts = {row: text for row, text in enumerate(TEXTS) if row != BAD}
    assert read(tmp_path, name, WITH_A_BAD_ROW[name]) == (texts, [BAD])


@every_format
def test_an_empty_file_is_refused(tmp_path, name):
    assert read(tmp_path, name, b"") is None


@every_format
@DRAWN
@given(place=PLACES)
@example(place=1)
@example(place=10)
@example(place=-9)
@example(place=-1)
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


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_no_bit_of_a_page_header_loses_rows_without_a_word(tmp_path, version):
    options = {"row_group_size": 5, "compression": "zstd", "data_page_version": version}
    path = write_rows(tmp_path / "whole.parquet", ROWS, use_dictionary=False, **options)
    whole = Path(path).read_bytes()
    heads = flipped(whole[4:36], 8 * 32)
    found = [read(tmp_path, "a.parquet", whole[:4] + head + whole[36:]) for head in heads]
    assert None in found
    assert {len(texts) + len(rejected) for texts, rejected in filter(None, found)} == {len(ROWS)}


@every_format
def test_a_row_over_16_mib_is_rejected_and_the_others_are_read(tmp_path, name):
    half = "some words " * 800_000
    large = {"prompt": half, "chosen": half, "rejected": "r"}
    (tmp_path / name).write_bytes(FORMATS[name]([*ROWS[:2], large, *ROWS[2:]]))
    records, rejected = read_in_slices(tmp_path / name)
    assert [bad.reason for bad in rejected] == ["too_large"]
    assert [record.prompt for record in records] == [row["prompt"] for row in ROWS]


PROMPTS = ["p" * 3, "q" * 5, "XX"]
STRING, VIEW = pa.string(), pa.string_view()
KINDS = {
    "string": STRING,
    "large_string": pa.large_string(),
    "dictionary": pa.dictionary(pa.int32(), STRING),
    "list": pa.list_(pa.struct([("role", STRING), ("content", STRING)])),
    "view list": pa.list_view(pa.struct([("role", STRING), ("content", VIEW)])),
}


def write_prompts(path, kind):
    """A batch of three pairs whose prompts are of this kind."""
    prompts = [[{"role": "user", "content": one}] for one in PROMPTS] if "list" in kind else PROMPTS
    cells = {"prompt": pa.array(prompts, KINDS[kind]), "chosen": ["c"] * 3, "rejected": ["rr"] * 3}
    batch = pa.record_batch(cells)
    with pa.ipc.new_stream(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    return path.read_bytes()


@pytest.mark.parametrize("kind", [*KINDS, "csv", "jsonl", "json"])
def test_bytes_of_a_file_that_are_not_utf8_reject_their_own_row_only(tmp_path, kind):
    path = tmp_path / f"a.{'arrow' if kind in KINDS else kind}"
    if kind in KINDS:
        write_prompts(path, kind)
    else:
        write_rows(path, [{"prompt": text, "chosen": "c", "rejected": "rr"} for text in PROMPTS])
    path.write_bytes(path.read_bytes().replace(b"XX", b"\xe9X"))  # as Latin-1 has it
    records, rejected = read_in_slices(path)
    assert [record.row for record in records] == [0, 1]
    assert [(bad.row, bad.reason) for bad in rejected] == [(2, "schema")]


@pytest.mark.parametrize(
    ("kind", "numbers", "further"),
    [
        ("string", [0, 3, 8, 10], [0, 3, 8, 1000]),
        ("string", [0, 3, 8, 10], [0, 3, -8, 10]),
        ("large_string", [0, 0, 3, 0, 8, 0, 10, 0], [0, 0, 3, 0, 8, 0, 1 << 20, 0]),
        ("dictionary", [0, 1, 2], [0, 1, 9]),
        ("list", [0, 1, 2, 3], [0, 1, 2, 4]),
        ("list", [0, 3, 8, 10], [0, 3, 8, 1 << 20]),
        ("view list", [0, 1, 2], [0, 1, 5]),
    ],
)
def test_offsets_and_indices_that_lead_out_of_their_batch_are_refused(
    tmp_path, kind, numbers, further
):
    path = tmp_path / "a.arrow"
    before, after = (struct.pack(f"<{len(one)}i", *one) for one in (numbers, further))
    whole = write_prompts(path, kind)
    assert before in whole
    path.write_bytes(whole.replace(before, after))
    with pytest.raises(BadDataError, match=r"a\.arrow"):
        read_in_slices(path)


def test_cells_of_csv_keep_line_ends_and_may_be_long(tmp_path):
    prompts = ["one\r\ntwo\rthree\nfour", "word " * 40_000, 'a "quoted"\r\n, mark']
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("prompt", "chosen", "rejected"), *((one, "c", "r") for one in prompts)])
    records, rejected = read_in_slices(tmp_path / "a.csv")
    assert [record.prompt for record in records] == prompts
    assert not rejected
    with (tmp_path / "a.csv").open("a", newline="") as file:
        csv.writer(file).writerow(("p", "c" * (17 << 20), "r"))
    with pytest.raises(BadDataError, match=r"a\.csv .*line 9 "):
        read_in_slices(tmp_path / "a.csv")
