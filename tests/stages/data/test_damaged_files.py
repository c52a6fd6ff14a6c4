"""A damaged file is refused, or all of its rows are read, and from its own bytes alone."""

import multiprocessing
import struct
from itertools import product

import pyarrow as pa
import pytest

from align.schemas.errors import BadDataError
from support.damaged_files import (
    DICTIONARY,
    FILES,
    LARGE,
    PAIRS,
    PLAIN,
    ROWS,
    STRING,
    VIEW,
    pairs,
    parquet,
    read_damaged,
    read_in_slices,
)
from support.patience import PATIENCE
from support.read_rows import write_rows

CHILDREN = multiprocessing.get_context("forkserver")  # of a process that has no threads


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.long)])
def test_a_file_damaged_by_chance_is_refused_or_read_row_by_row_from_its_own_bytes(tmp_path, count):
    for name, whole in FILES.items():
        (tmp_path / name).write_bytes(whole)
        assert len(read_in_slices(tmp_path / name)[0]) == ROWS
    child = CHILDREN.Process(target=read_damaged, args=(tmp_path, count), daemon=True)
    child.start()  # which may die of it
    child.join(PATIENCE)
    assert (child.exitcode, (tmp_path / "faults").read_text()) == (0, "")


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_no_bit_of_a_page_header_loses_rows_without_a_word(tmp_path, version):
    path, rows = tmp_path / "a.parquet", PAIRS[:15]
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
    path.write_bytes(parquet(*pairs(STRING), **PLAIN, write_page_checksum=True))
    assert len(read_in_slices(path)[0]) == ROWS
    path.write_bytes(path.read_bytes().replace(b"good 7", b"g\0od 7"))
    with pytest.raises(BadDataError, match=r"a\.parquet cannot be read"):
        read_in_slices(path)


TEXTS = ["p" * 3, "q" * 5, "XX"]
KINDS = {
    "string": STRING,
    "large_string": LARGE,
    "dictionary": DICTIONARY,
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
    assert [(bad.row, bad.reason) for bad in rejected] == [(2, "bad_utf8")]


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
    with pytest.raises(BadDataError, match=r"a\.arrow cannot be read after row 0"):
        read_in_slices(path)
