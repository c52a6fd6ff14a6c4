"""A damaged file is refused, or all of its rows are read, and from its own bytes alone."""

import io
import multiprocessing
import random
import struct
from itertools import product

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import AlignError, BadDataError
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.input_files import (
    data_bytes,
    iter_slice,
    open_inputs,
    slices_of,
)
from support.flips import SEED
from support.patience import PATIENCE
from support.read_rows import write_rows

CHILDREN = multiprocessing.get_context("forkserver")  # of a process that has no threads
ROWS = 30
STRING, LARGE, VIEW = pa.string(), pa.large_string(), pa.string_view()
DICTIONARY = pa.dictionary(pa.int32(), STRING)
PAIRS = [
    {"prompt": f"{i}. " + "why " * (i % 5), "chosen": f"good {i}", "rejected": "bad" * (1 + i % 3)}
    for i in range(ROWS)
]
CHATS = [{name: [{"role": "user", "content": text}] for name, text in row.items()} for row in PAIRS]


def pairs(kind):
    return PAIRS, pa.schema([(name, kind) for name in PAIRS[0]])


def chats():
    kind = pa.list_(pa.struct([("role", STRING), ("content", STRING)]))
    return CHATS, pa.schema([(name, kind) for name in PAIRS[0]])


def arrow(rows, schema, opener=pa.ipc.new_stream, **options):
    sink = io.BytesIO()
    with opener(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for start in range(0, ROWS, 10):
            part = pa.Table.from_pylist(rows[start : start + 10], schema)
            writer.write_batch(part.combine_chunks().to_batches()[0])
    return sink.getvalue()


def parquet(rows, schema, **options):
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema), sink, row_group_size=10, **options)
    return sink.getvalue()


PLAIN = {"compression": "none", "use_dictionary": False}
FILES = {
    "strings.arrow": arrow(*pairs(STRING)),
    "views of a file.arrow": arrow(*pairs(VIEW), pa.ipc.new_file),
    "dictionaries.arrow": arrow(*pairs(DICTIONARY)),
    "file of messages.arrow": arrow(*chats(), pa.ipc.new_file),
    "messages, zstd.arrow": arrow(*chats(), compression="zstd"),
    "zstd.parquet": parquet(*pairs(STRING), compression="zstd"),
    "plain, second version.parquet": parquet(*pairs(STRING), **PLAIN, data_page_version="2.0"),
    "checksums.parquet": parquet(*pairs(STRING), write_page_checksum=True),
    "messages.parquet": parquet(*chats(), compression="snappy"),
}


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.long)])
def test_a_file_damaged_by_chance_is_refused_or_read_row_by_row_from_its_own_bytes(tmp_path, count):
    for name, whole in FILES.items():
        (tmp_path / name).write_bytes(whole)
        assert len(read_in_slices(tmp_path / name)[0]) == ROWS
    child = CHILDREN.Process(target=read_damaged, args=(tmp_path, count), daemon=True)
    child.start()  # which may die of it
    child.join(PATIENCE)
    assert (child.exitcode, (tmp_path / "faults").read_text()) == (0, "")


def read_damaged(folder, count):
    """Writes what is wrong with the reading of damaged files, and which of them was the last."""
    for name, whole in FILES.items():
        (folder / "faults").write_text(name)
        is_plain = name.endswith("arrow") and "zstd" not in name
        faults = [fault_of(folder / name, whole, number, is_plain) for number in range(count)]
        if any(faults):
            (folder / "faults").write_text("\n".join([name, *filter(None, faults)]))
            return
    (folder / "faults").write_text("")


def damaged(content, draw):
    """The bytes with a bit flipped, a word enlarged, or a part replaced or cut off."""
    data, at = bytearray(content), draw.randrange(len(content) - 8)
    size = draw.choice((4, 8, 64, 512))
    match draw.randrange(4):
        case 0:
            data[at] ^= 1 << draw.randrange(8)
        case 1:
            words = range(0, len(data) - 4, 4)
            small = [word for word in words if data[word + 1 : word + 4] == b"\0\0\0"]
            data[draw.choice(small) + draw.randrange(1, 4)] = 1 << draw.randrange(8)
        case 2:
            data[at : at + size] = data[:size]
        case 3:
            del data[at + 1 :]
    return bytes(data)


def fault_of(path, whole, number, is_plain):
    """What is wrong with the reading of a damaged file; empty if nothing is."""
    content = damaged(whole, random.Random(f"{SEED} {number}"))
    path.write_bytes(content)
    try:
        records, rejected = read_in_slices(path)
    except AlignError:
        return ""
    except Exception as error:
        return f"{number}: {type(error).__name__}: {error}"
    if len(records) + len(rejected) != ROWS:
        return f"{number}: {len(records)} records and {len(rejected)} rejected rows"
    parts = [part for one in records for part in (one.prompt, *one.completions)]
    texts = [part if isinstance(part, str) else part[0]["content"] for part in parts]
    strays = [text for text in texts if text.encode() not in content]
    return f"{number}: {strays} is not in the file" if is_plain and strays else ""


def read_in_slices(path):
    """The records and the rejected rows of a file, as stage 1 reads them."""
    inputs = open_inputs([str(path)])
    shape = common_shape(inputs, {})
    records, rejected = [], []
    for part in slices_of(inputs, shape.columns, total=data_bytes(inputs, shape.columns)):
        for chunk, _ in iter_slice(inputs, part, shape.columns):
            good, bad = parse_chunk(chunk, shape)
            records += good
            rejected += bad
    return records, rejected


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
