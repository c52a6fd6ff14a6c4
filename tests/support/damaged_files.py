"""Files of data that are damaged by chance, and how a reader must take each."""

import io
import random

import pyarrow as pa
import pyarrow.parquet as pq

from align.schemas.errors import AlignError
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.input_files import data_bytes, iter_slice, open_inputs, slices_of
from support.flips import SEED

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


def read_in_slices(path, **options):
    """The records and the rejected rows of a file, as stage 1 reads them."""
    records, rejected = [], []
    for good, bad in read_by_chunk(path, **options):
        records += good
        rejected += bad
    return records, rejected


def read_by_chunk(path, **options):
    """Yields those of each chunk."""
    inputs = open_inputs([str(path)], **options)
    shape = common_shape(inputs, {})
    for part in slices_of(inputs, shape.columns, total=data_bytes(inputs, shape.columns)):
        for chunk, is_own in iter_slice(inputs, part, shape.columns):
            if is_own:
                yield parse_chunk(chunk, shape)
