"""A damaged file is refused, or all of its rows are read, and from its own bytes alone."""

import csv
import json
import struct
from itertools import product

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import BadDataError
from support.read_files import read_in_slices
from support.read_rows import write_rows

PAIRS = [
    {"prompt": f"{i}. " + "why " * (i % 5), "chosen": f"good {i}", "rejected": "bad" * (1 + i % 3)}
    for i in range(15)
]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_no_bit_of_a_page_header_loses_rows_without_a_word(tmp_path, version):
    path, rows = tmp_path / "a.parquet", PAIRS
    options = {"row_group_size": 5, "compression": "zstd", "data_page_version": version}
    whole = write_rows(path, rows, use_dictionary=False, **options) and path.read_bytes()
    refused = 0
    for byte, bit in product(range(4, 36), range(8)):
        broken = bytearray(whole)
        broken[byte] ^= 1 << bit
        path.write_bytes(broken)
        try:
            records, rejected = read_in_slices(path)
        except BadDataError:
            refused += 1
        else:
            assert len(records) + len(rejected) == len(rows), (byte, bit)
    assert refused


def test_a_page_that_is_not_what_its_checksum_says_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    plain = {"compression": "none", "use_dictionary": False}
    pq.write_table(pa.Table.from_pylist(PAIRS), path, **plain, write_page_checksum=True)
    assert len(read_in_slices(path)[0]) == len(PAIRS)
    path.write_bytes(path.read_bytes().replace(b"good 7", b"g\0od 7"))
    with pytest.raises(BadDataError, match=r"a\.parquet"):
        read_in_slices(path)


TEXTS = ["p" * 3, "q" * 5, "XX"]
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
    prompts = [[{"role": "user", "content": one}] for one in TEXTS] if "list" in kind else TEXTS
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
        write_rows(path, [{"prompt": text, "chosen": "c", "rejected": "rr"} for text in TEXTS])
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


def write_feather(path, rows):
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def write_indented(path, rows):
    path.write_text(json.dumps(rows, indent=2))


WRITERS = {
    "a.jsonl": write_rows,
    "a.json": write_indented,
    "a.csv": write_rows,
    "a.parquet": lambda path, rows: write_rows(path, rows, row_group_size=4),
    "a.arrow": write_rows,
    "a.feather": write_feather,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_row_over_16_mib_is_rejected_and_the_others_are_read(tmp_path, name):
    half = "some words " * 800_000
    large = {"prompt": half, "chosen": half, "rejected": "r"}
    WRITERS[name](tmp_path / name, [*PAIRS[:2], large, *PAIRS[2:]])
    records, rejected = read_in_slices(tmp_path / name)
    assert [bad.reason for bad in rejected] == ["too_large"]
    assert [record.prompt for record in records] == [row["prompt"] for row in PAIRS]


def test_cells_of_csv_keep_their_line_ends_and_may_be_longer_than_python_allows(tmp_path):
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
