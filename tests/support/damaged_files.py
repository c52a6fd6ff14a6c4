"""Columnar files of several layouts, damaged by chance, and how reading each of them ends."""

import io
import json
import os
import random
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq

from align.schemas.errors import AlignError
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.input_files import data_bytes, iter_slice, open_inputs, slices_of

ROWS = 30
STRING, LARGE, VIEW = pa.string(), pa.large_string(), pa.string_view()
PAIRS = [
    {"prompt": f"{i}. " + "why " * (i % 5), "chosen": f"good {i}", "rejected": "bad" * (1 + i % 3)}
    for i in range(ROWS)
]
CHATS = [{name: [{"role": "user", "content": text}] for name, text in row.items()} for row in PAIRS]
SCORED = [
    {
        "prompt": row["prompt"],
        "completions": ["a" * i, row["chosen"]],
        "scores": [Decimal(i), Decimal(0)],
    }
    for i, row in enumerate(PAIRS, start=1)
]


def columns(kind):
    return pa.schema([(name, kind) for name in PAIRS[0]])


def messages(text, lists=pa.list_):
    return lists(pa.struct([("role", text), ("content", text)]))


def scored(text):
    score = pa.list_(pa.decimal128(9, 2))
    return pa.schema([("prompt", text), ("completions", pa.list_(text)), ("scores", score)])


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


FILE = pa.ipc.new_file
ARROW = {
    "strings": arrow(PAIRS, columns(STRING)),
    "file of large strings": arrow(PAIRS, columns(LARGE), FILE),
    "views": arrow(PAIRS, columns(VIEW)),
    "dictionaries": arrow(PAIRS, columns(pa.dictionary(pa.int32(), STRING))),
    "file of messages": arrow(CHATS, columns(messages(STRING)), FILE),
    "large messages": arrow(CHATS, columns(messages(LARGE, pa.large_list))),
    "lists": arrow(SCORED, scored(STRING)),
    "lists of views, zstd": arrow(SCORED, scored(VIEW), compression="zstd"),
}
PARQUET = {
    "zstd": parquet(PAIRS, columns(STRING), compression="zstd"),
    "plain, second version": parquet(
        PAIRS, columns(STRING), compression="none", use_dictionary=False, data_page_version="2.0"
    ),
    "checksums": parquet(PAIRS, columns(STRING), write_page_checksum=True),
    "messages": parquet(CHATS, columns(messages(STRING)), compression="snappy"),
    "lists": parquet(SCORED, scored(STRING), compression="none"),
}


def damaged(content, draw):
    """The bytes with a bit flipped, a byte set, a word enlarged, or a part zeroed, moved or cut."""
    data, at = bytearray(content), draw.randrange(len(content) - 8)
    size = draw.choice((4, 8, 64, 512))
    match draw.randrange(6):
        case 0:
            data[at] ^= 1 << draw.randrange(8)
        case 1:
            data[at] = draw.choice((0, 1, 0x7F, 0xFF))
        case 2:
            small = [
                word
                for word in range(0, len(data) - 4, 4)
                if data[word + 1 : word + 4] == b"\0\0\0"
            ]
            data[draw.choice(small) + draw.randrange(1, 4)] = 1 << draw.randrange(8)
        case 3:
            data[at : at + size] = bytes(len(data[at : at + size]))
        case 4:
            data[at:at] = data[:size]
            del data[:size]
        case 5:
            del data[at + 1 :]
    return bytes(data)


def texts_in(value):
    """All texts in prompts and completions."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    return [text for one in inner for text in texts_in(one)]


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


def fault_of(path, content, is_plain):
    """What is wrong with the reading of a damaged file; empty if nothing is."""
    try:
        records, rejected = read_in_slices(path)
    except AlignError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if len(records) + len(rejected) != ROWS:
        return f"{len(records)} records and {len(rejected)} rejected rows"
    texts = [text for one in records for text in texts_in((one.prompt, one.completions))]
    if is_plain and any(text.encode() not in content + b"assistant" for text in texts):
        return "text that is not in the file"
    return ""


def faults_of(path, content, count, seed, is_plain=False):
    """The numbers of so many damages and what is wrong; a child reads, which may die of it."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        for number in range(count):
            broken = damaged(content, random.Random(f"{seed} {number}"))
            path.write_bytes(broken)
            os.write(sender, f"{json.dumps([number, fault_of(path, broken, is_plain)])}\n".encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as said:
        seen = [json.loads(line) for line in said]
    status = os.waitpid(child, 0)[1]
    died = [[len(seen), f"ends the process: status {status}"]] if status else []
    return [one for one in seen + died if one[1]]
