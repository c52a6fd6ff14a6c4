"""Data files that are small and hold much: what they decode to must not fill the memory."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MB = 1_000_000
HUGE, LONG, FINE = 1100 * MB, 200 * MB, 4 * MB  # cells: two that are too large, and one that is not
ROWS, PLACE = 12, 5  # rows of most files, and which of them is too large
GROUP = 4
STRING = pa.string()
MESSAGES = pa.list_(pa.struct([("role", STRING), ("content", STRING)]))
DICTIONARY = pa.dictionary(pa.int32(), STRING)


@dataclass(frozen=True)
class Large:
    """A file, and how many of its rows are used and put into quarantine, or that it is refused."""

    write: Callable[[Path], None]
    used: int = ROWS - 1
    refused: int = 1
    is_error: bool = False


def text(size):
    return "long text " * (size // 10)


def pairs(prompts, kind=STRING):
    """A table of these prompts, each with two answers."""
    count = len(prompts)
    cells = prompts if isinstance(prompts, pa.Array) else pa.array(prompts, kind)
    answers = {"chosen": ["good"] * count, "rejected": ["bad"] * count}
    if pa.types.is_nested(cells.type) and cells.type != RUNS:
        answers = {
            name: pa.array([[{"role": "assistant", "content": one[0]}]] * count, MESSAGES)
            for name, one in answers.items()
        }
    return pa.table({"prompt": cells, **answers})


RUNS = pa.run_end_encoded(pa.int32(), STRING)


def one_cell(size):
    return [text(size) if row == PLACE else f"why {row}?" for row in range(ROWS)]


def one_chat(count):
    """Prompts of which one has so many messages, made by Arrow: in Python they are too many."""
    sizes = [count if row == PLACE else 1 for row in range(ROWS)]
    offsets = pa.array([sum(sizes[:row]) for row in range(ROWS + 1)], pa.int32())
    cells = {"role": "user", "content": "why?"}
    values = [
        pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int8()), sum(sizes)), [one])
        for one in cells.values()
    ]
    struct = pa.StructArray.from_arrays([one.cast(STRING) for one in values], [*cells])
    return pa.ListArray.from_arrays(offsets, struct)


def parquet(make, path, **options):
    pq.write_table(make(), path, **{"row_group_size": GROUP, "compression": "zstd", **options})


def arrow(make, path, rows=GROUP, **options):
    table = make()
    opener = pa.ipc.new_file if path.suffix == ".feather" else pa.ipc.new_stream
    with opener(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in table.to_batches(max_chunksize=rows):
            writer.write_batch(batch)


def same(kind, size=FINE, count=300):
    """One prompt in so many rows, of which Arrow keeps it once."""
    one, zeros = pa.array([text(size)]), pa.repeat(pa.scalar(0, pa.int32()), count)
    if kind == DICTIONARY:
        cells: Any = pa.DictionaryArray.from_arrays(zeros, one)
    elif kind == RUNS:
        cells = pa.RunEndEncodedArray.from_arrays(pa.array([count], pa.int32()), one)
    elif kind == pa.string_view():
        cells = _views(one, count)
    else:
        chat = pa.StructArray.from_arrays([pa.array(["user"]), one], ["role", "content"])
        cells = pa.ListViewArray.from_arrays(
            zeros, pa.repeat(pa.scalar(1, pa.int32()), count), chat
        )
    return pairs(cells)


def _views(one, count):
    views = one.cast(pa.string_view())
    head, *bodies = views.buffers()[1:]
    repeated = pa.py_buffer(head.to_pybytes()[:16] * count)
    return pa.Array.from_buffers(pa.string_view(), count, [None, repeated, *bodies])


def stream(path):
    """A file of bytes, packed as its name says."""
    if path.suffix == ".gz":
        return gzip.open(path, "wb", compresslevel=1)
    return pa.output_stream(str(path), compression="zstd" if path.suffix == ".zst" else None)


def written(before, size, after, path, piece=b"long text "):
    """Bytes between others, so many of them that no process should hold them."""
    block = piece * (MB // len(piece))
    with stream(path) as file:
        file.write(before)
        for _ in range(size // len(block)):
            file.write(block)
        file.write(after)


ANSWERS = b'", "chosen": "good", "rejected": "bad"}'
LINE = b'{"prompt": "why?' + ANSWERS


def lines(size, path):
    """JSON lines, one of them long."""
    before = (LINE + b"\n") * PLACE + b'{"prompt": "'
    written(before, size, ANSWERS + b"\n" + (LINE + b"\n") * (ROWS - PLACE - 1), path)


def elements(size, path, head=b"[", end=b"]"):
    """A JSON array with one long element."""
    before = head + (LINE + b",\n") * PLACE + b'{"prompt": "'
    rest = b",\n".join([ANSWERS, *[LINE] * (ROWS - PLACE - 1)])
    written(before, size, rest + end, path)


def json_chat(count, path):
    before = (LINE + b"\n") * PLACE + b'{"prompt": [{"role": "user", "content": "why?"}'
    after = b'], "chosen": "good", "rejected": "bad"}\n' + (LINE + b"\n") * (ROWS - PLACE - 1)
    written(before, count * 34, after, path, b', {"role": "user", "content": "b"}')


def commas(size, path, mark=b'"', piece=b"long text "):
    """A CSV file with one long cell."""
    rows = b"why?,good,bad\r\n"
    before = b"prompt,chosen,rejected\r\n" + rows * PLACE + mark
    written(before, size, mark + b",good,bad\r\n" + rows * (ROWS - PLACE - 1), path, piece)


def cells_of(size):
    return partial(pairs, one_cell(size))


def _parquet(size, **options):
    return partial(parquet, lambda: pairs(one_cell(size)), **options)


def _arrow(size, **options):
    return partial(arrow, lambda: pairs(one_cell(size)), **options)


GROUPS = {"used": ROWS - GROUP, "refused": GROUP}  # where a row cannot be taken from its group
MANY = {"used": 300, "refused": 0}
NESTED = b'{"prompt": "why?", "chosen": "good", "rejected": "bad", "more": '
FILES = {
    "parquet one prompt in 300 rows.parquet": Large(
        partial(parquet, lambda: same(DICTIONARY), row_group_size=1000), **MANY
    ),
    "parquet huge cell.parquet": Large(_parquet(HUGE), **GROUPS),
    "parquet huge cell, no dictionary.parquet": Large(
        _parquet(HUGE, use_dictionary=False, compression="gzip"), **GROUPS
    ),
    "parquet long cell.parquet": Large(_parquet(LONG)),
    "parquet long cell, second version.parquet": Large(
        _parquet(LONG, use_dictionary=False, data_page_version="2.0")
    ),
    "parquet 3 million messages.parquet": Large(partial(parquet, lambda: pairs(one_chat(3 * MB)))),
    "arrow one prompt in 300 rows.arrow": Large(
        partial(arrow, lambda: same(DICTIONARY), rows=1000), **MANY
    ),
    "arrow one view in 300 rows.arrow": Large(
        partial(arrow, lambda: same(pa.string_view()), rows=1000), **MANY
    ),
    "arrow one run of 300 rows.arrow": Large(partial(arrow, lambda: same(RUNS), rows=1000), **MANY),
    "arrow one list in 300 rows.arrow": Large(
        partial(arrow, lambda: same(pa.list_view(MESSAGES.value_type)), rows=1000), **MANY
    ),
    "arrow huge cell, zstd.arrow": Large(_arrow(HUGE, compression="zstd"), is_error=True),
    "arrow long cell, zstd.arrow": Large(_arrow(LONG, compression="zstd")),
    "feather long cell, lz4.feather": Large(_arrow(LONG, compression="lz4")),
    "feather huge cell, lz4.feather": Large(_arrow(HUGE, compression="lz4"), **GROUPS),
    "feather 3 million messages.feather": Large(
        partial(arrow, lambda: pairs(one_chat(3 * MB)), compression="zstd")
    ),
    "json long line.jsonl": Large(partial(lines, LONG)),
    "json huge line.jsonl.zst": Large(partial(lines, HUGE)),
    "json huge line.jsonl.gz": Large(partial(lines, HUGE)),
    "json 3 million messages.jsonl.zst": Large(partial(json_chat, 3 * MB)),
    "json long element.json": Large(partial(elements, LONG)),
    "json huge element.json.zst": Large(partial(elements, HUGE)),
    "json huge element of data.json.gz": Large(
        partial(elements, HUGE, head=b'{"data": [', end=b"]}")
    ),
    "json blank lines.jsonl.zst": Large(
        partial(written, b"", HUGE, (LINE + b"\n") * ROWS, piece=b"  \n"), ROWS, 0
    ),
    "json no line ends.jsonl.zst": Large(
        partial(written, LINE + b"\n", HUGE, b"", piece=b"a"), 1, 1
    ),
    "json many lists.jsonl": Large(
        partial(written, NESTED + b"[[]", 14 * MB, b"]}\n" + LINE + b"\n", piece=b",[]"), 2, 0
    ),
    "json deep lists.jsonl": Large(
        partial(written, NESTED, 14 * MB, b"\n" + LINE + b"\n", piece=b"["), 1, 1
    ),
    "csv long cell.csv": Large(partial(commas, LONG)),
    "csv long cell of many lines.csv": Large(partial(commas, LONG, piece=b"a line\r\n")),
    "csv long cell, no quotes.csv": Large(partial(commas, LONG, mark=b"")),
    "csv huge cell.csv.zst": Large(partial(commas, HUGE)),
    "csv huge cell of quotes.csv.gz": Large(partial(commas, HUGE, piece=b'""')),
    "csv huge header.csv.zst": Large(
        partial(written, b"prompt,", HUGE, b"\r\nwhy?,good\r\n"), is_error=True
    ),
    "csv no quote ends.csv.zst": Large(
        partial(written, b'prompt,chosen,rejected\r\nwhy?,good,bad\r\n"', HUGE, b""), is_error=True
    ),
}
