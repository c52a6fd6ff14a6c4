"""Data files of every format, damaged by chance, and what an independent reader finds in them."""

import csv
import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = ("prompt", "chosen", "rejected")
ROWS = 30
TEXTS = [
    (f"{i}. why" + ' "é,\n' * (i % 4), f"good, {i}" + " ✓" * (i % 5), "bad" * (1 + i % 3))
    for i in range(ROWS)
]
STRING, LARGE, VIEW = pa.string(), pa.large_string(), pa.string_view()
DICTIONARY = pa.dictionary(pa.int32(), STRING)
RUNS = pa.run_end_encoded(pa.int32(), STRING)
MESSAGE = pa.struct([("role", STRING), ("content", STRING)])
LIST, LISTS = pa.list_(MESSAGE), (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)
PLAIN = {"compression": "none", "use_dictionary": False}


def table(kind):
    """The rows in one of Arrow's types; in a nested one, as conversations of one message."""
    is_text = not pa.types.is_nested(kind) or kind == RUNS
    cells = {
        name: [row[at] if is_text else [_message(name, row[at])] for row in TEXTS]
        for at, name in enumerate(COLUMNS)
    }
    return pa.table({name: _column(column, kind) for name, column in cells.items()})


def _message(column, text):
    return {"role": "user" if column == "prompt" else "assistant", "content": text}


def _column(cells, kind):
    if kind == RUNS:
        return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, ROWS + 1), pa.int32()), cells)
    return pa.array(cells, kind)


def arrow(kind, opener=pa.ipc.new_stream, **options):
    sink = io.BytesIO()
    rows = table(kind).combine_chunks()
    with opener(sink, rows.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in rows.to_batches(max_chunksize=10):
            writer.write_batch(batch)
    return sink.getvalue()


def parquet(kind, **options):
    sink = io.BytesIO()
    pq.write_table(table(kind), sink, row_group_size=10, **options)
    return sink.getvalue()


def json_text(shape):
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in TEXTS]
    if shape == "lines":
        return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()
    return json.dumps(rows if shape == "array" else {"version": 1, "data": rows}).encode()


def csv_text(delimiter):
    sink = io.StringIO()
    csv.writer(sink, delimiter=delimiter).writerows([COLUMNS, *TEXTS])
    return sink.getvalue().encode()


def zstd(content):
    return pa.Codec("zstd").compress(content, asbytes=True)


def _state(names):
    return json.dumps({"_data_files": [{"filename": name} for name in names]}).encode()


# Each a file by the name of what it shows, or a file of a folder, beside the others of it.
FILES = {
    "parquet zstd.parquet": parquet(STRING, compression="zstd"),
    "parquet snappy, dictionary.parquet": parquet(DICTIONARY, compression="snappy"),
    "parquet gzip, no dictionary.parquet": parquet(
        STRING, compression="gzip", use_dictionary=False
    ),
    "parquet plain, version 1.parquet": parquet(STRING, **PLAIN),
    "parquet plain, version 2.parquet": parquet(STRING, **PLAIN, data_page_version="2.0"),
    "parquet deltas.parquet": parquet(
        STRING, use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY", compression="none"
    ),
    "parquet lengths.parquet": parquet(
        LARGE, use_dictionary=False, column_encoding="DELTA_LENGTH_BYTE_ARRAY", compression="lz4"
    ),
    "parquet checksums.parquet": parquet(STRING, write_page_checksum=True),
    "parquet messages.parquet": parquet(LIST, compression="snappy"),
    "parquet messages, brotli.parquet": parquet(LIST, compression="brotli", use_dictionary=False),
    "parquet page index.parquet": parquet(STRING, write_page_index=True, compression="none"),
    "arrow strings.arrow": arrow(STRING),
    "arrow large.arrow": arrow(LARGE),
    "arrow views.arrow": arrow(VIEW),
    "arrow dictionaries.arrow": arrow(DICTIONARY),
    "arrow runs.arrow": arrow(RUNS),
    "arrow messages.arrow": arrow(LIST),
    "arrow list views.arrow": arrow(pa.list_view(MESSAGE)),
    "arrow zstd.arrow": arrow(LIST, compression="zstd"),
    "feather strings.feather": arrow(STRING, pa.ipc.new_file),
    "feather views.feather": arrow(VIEW, pa.ipc.new_file),
    "feather dictionaries.feather": arrow(DICTIONARY, pa.ipc.new_file),
    "feather messages.feather": arrow(LIST, pa.ipc.new_file),
    "feather lz4.feather": arrow(STRING, pa.ipc.new_file, compression="lz4"),
    "feather messages, zstd.feather": arrow(LIST, pa.ipc.new_file, compression="zstd"),
    "datasets/data-00000-of-00001.arrow": arrow(STRING),
    "datasets/state.json": _state(["data-00000-of-00001.arrow"]),
    "json lines.jsonl": json_text("lines"),
    "json lines.jsonl.gz": gzip.compress(json_text("lines"), mtime=0),
    "json lines.jsonl.zst": zstd(json_text("lines")),
    "json array.json": json_text("array"),
    "json array.json.zst": zstd(json_text("array")),
    "json data.json": json_text("data"),
    "csv commas.csv": csv_text(","),
    "csv commas.csv.gz": gzip.compress(csv_text(","), mtime=0),
    "csv tabs.tsv": csv_text("\t"),
    "csv tabs.tsv.zst": zstd(csv_text("\t")),
}


def damaged(content, draw):
    """The bytes after one to three changes, half of them near the ends, where the metadata is."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
        _damage(data, draw)
    return bytes(data)


def _damage(data, draw):
    last = max(1, len(data) - 8)
    ends = (draw.randrange(min(last, 200)), _near_end(last, draw))
    at = draw.choice((*ends, *(draw.randrange(last) for _ in ends)))
    size = draw.choice((1, 4, 8, 64, 512))
    match draw.randrange(16):
        case 0 | 1 | 8 | 9 | 10 | 11:
            data[at] ^= 1 << draw.randrange(8)
        case 2 | 12 | 13:
            data[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        case 3 | 14 | 15:
            small = [word for word in range(0, len(data) - 4, 4) if _is_small(data, word)]
            if small:
                data[draw.choice(small) + draw.randrange(1, 4)] = 1 << draw.randrange(8)
        case 4:
            other = draw.randrange(last)
            data[at : at + size] = data[other : other + size]
        case 5:
            data[at : at + size] = draw.choice((b"", b"\0" * size, b"\xff" * size))
        case 6:
            data[at:at] = draw.choice((draw.randbytes(size), data[at : at + size]))
        case 7:
            del data[at + 1 :]


def _near_end(last, draw):
    return last - draw.randrange(min(last, 1200)) if last > 1 else 0


def _is_small(data, word):
    return data[word + 1 : word + 4] == b"\0\0\0"


def rows_in(name, content):
    """The rows as an independent reader has them, each a list of texts, or None if it is not one.

    An exception if it cannot read them.
    """
    if name == "datasets/state.json":
        return list(map(list, TEXTS))
    if name.endswith(".gz"):
        content, name = gzip.decompress(content), name.removesuffix(".gz")
    elif name.endswith(".zst"):
        content = pa.input_stream(io.BytesIO(content), compression="zstd").read()
        name = name.removesuffix(".zst")
    if name.endswith((".csv", ".tsv")):
        return _csv_rows(content, "\t" if name.endswith(".tsv") else None)
    if name.endswith((".json", ".jsonl")):
        return _json_rows(content)
    import polars as pl  # noqa: PLC0415 - few cases need it

    if name.endswith(".parquet"):
        frame = pl.read_parquet(io.BytesIO(content))
    elif content.startswith(b"ARROW1"):
        frame = pl.read_ipc(io.BytesIO(content), memory_map=False)
    else:
        frame = pl.read_ipc_stream(io.BytesIO(content))
    return [_texts(row) for row in frame.select(COLUMNS).to_dicts()]


def _json_rows(content):
    """Bytes that are no text survive as surrogates, and their rows are None."""
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        if text.lstrip().startswith("["):
            raise
        whole = None
    if isinstance(whole, dict) and isinstance(whole.get("data"), list):
        whole = whole["data"]
    if not isinstance(whole, list):
        whole = [_json_or_none(line) for line in text.split("\n") if line and not line.isspace()]
    return list(map(_texts, whole))


def _json_or_none(line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _csv_rows(content, delimiter):
    text = content.decode("utf-8-sig", "surrogateescape")
    header = next(filter(str.strip, text.splitlines()), "")
    delimiter = delimiter or next((mark for mark in ",;\t" if mark in header), ",")
    header, *rows = filter(None, csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    return [
        _texts(dict(zip(header, row, strict=True))) if len(row) == len(header) else None
        for row in rows
    ]


def _texts(row):
    if not isinstance(row, dict):
        return None
    return [text_of(row.get(name)) for name in COLUMNS]


def text_of(cell):
    """The text of a cell, of a conversation of one message that of the message."""
    messages = list(cell) if isinstance(cell, list | tuple) else []
    if len(messages) == 1 and isinstance(messages[0], dict):
        return messages[0].get("content")
    return messages or cell
