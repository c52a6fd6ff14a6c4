"""Rows of a data file, or of a part of it, as dicts: Parquet, Arrow, CSV and JSON."""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator
from io import BufferedReader, TextIOWrapper
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import BadDataError
from ...schemas.rows import BadRow
from .cells import shown

Row: TypeAlias = "dict[str, Any]"  # the user's column: its value

MOST_CHARACTERS = 16 << 20  # in a row: a tokenizer needs a hundred times the memory of its text
BATCH_BYTES = 8 << 20  # of a columnar file that are Python objects at a time
BATCH_ROWS = 512
BLOCK_BYTES = 1 << 20
JSON_ROWS = 1000  # a JSON file's columns are the keys of so many first rows
TOO_DEEP = "a value is nested too deeply"


class FilePart(NamedTuple):
    """A part of a file that is read without the rest.

    It counts row groups of Parquet, record batches of Arrow or bytes of JSON lines. A CSV file, a
    JSON array and a compressed file cannot be cut: each is one part.
    """

    start: int
    stop: int
    bytes: int  # of data, uncompressed where that is known
    file: int = 0  # index of the input


WHOLE_FILE = FilePart(0, sys.maxsize, 0)


class Reader(NamedTuple):
    """The functions that read files of one ending."""

    columns: Callable[[Path], tuple[str, ...]]  # empty if the file has no rows
    # The smallest possible parts; JSON lines are cut into so many bytes.
    parts: Callable[[Path, Collection[str], int], list[FilePart]]
    # Text files give all columns of a row, columnar ones the requested columns.
    rows: Callable[[Path, Collection[str], FilePart], Iterator[Row | BadRow]]


# Parquet


def _parquet_columns(path: Path) -> tuple[str, ...]:
    with pq.ParquetFile(path, memory_map=False) as file:
        return tuple(file.schema_arrow.names) if file.metadata.num_rows else ()


def _parquet_parts(path: Path, columns: Collection[str], _: int) -> list[FilePart]:
    with pq.ParquetFile(path, memory_map=False) as file:
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        sizes = [_group_bytes(group, columns) for group in groups]
    return [FilePart(number, number + 1, size) for number, size in enumerate(sizes)]


def _group_bytes(group: pq.RowGroupMetaData, columns: Collection[str]) -> int:
    """The uncompressed size of these columns."""
    chunks = map(group.column, range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema.split(".", 1)[0] in columns
    )


def _parquet_rows(path: Path, columns: Collection[str], part: FilePart) -> Iterator[Row | BadRow]:
    # Without buffer_size a whole column chunk is in memory, with pre_buffer the whole file.
    options = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}
    with pq.ParquetFile(path, memory_map=False, **options) as file:
        wanted = [name for name in file.schema_arrow.names if name in columns]
        for number in range(part.start, min(part.stop, file.num_row_groups)):
            group, found = file.metadata.row_group(number), 0
            bytes_per_row = max(1, _group_bytes(group, wanted) // max(1, group.num_rows))
            size = max(1, min(BATCH_ROWS, BATCH_BYTES // bytes_per_row))
            # Each thread would keep freed memory, and the tokenizers need the cores.
            for batch in file.iter_batches(size, [number], wanted, use_threads=False):
                found += batch.num_rows
                yield from batch_rows(batch)
            if found != group.num_rows:  # Arrow does not report rows lost in a damaged page
                raise BadDataError(
                    f"row group {number:,} holds {found:,} rows, and its footer {group.num_rows:,}"
                )


# Arrow


def _open_ipc(source: pa.NativeFile, **options: Any) -> Any:
    """A reader of an Arrow file or an Arrow stream."""
    source.seek(0)
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    opener: Callable[..., Any] = pa.ipc.open_file if is_file else pa.ipc.open_stream
    return opener(source, **options)


def _ipc_columns(path: Path) -> tuple[str, ...]:
    sizes = _ipc_sizes(path)
    with pa.memory_map(str(path)) as source:
        names = tuple(_open_ipc(source).schema.names)
    batches = _ipc_batches(path, names[:1], WHOLE_FILE) if sizes else ()
    return names if any(batch.num_rows for batch in batches) else ()


def _ipc_parts(path: Path, _: Collection[str], __: int) -> list[FilePart]:
    return [FilePart(number, number + 1, size) for number, size in enumerate(_ipc_sizes(path))]


def _ipc_sizes(path: Path) -> list[int]:
    """The bytes of each record batch; those of an Arrow file are assumed to be equal."""
    with pa.memory_map(str(path)) as source:
        reader = _open_ipc(source)
        if isinstance(reader, pa.RecordBatchFileReader):
            count = reader.num_record_batches
            return [path.stat().st_size // max(1, count)] * count
        source.seek(0)
        sizes, end = [], 0
        for message in pa.ipc.MessageReader.open_stream(source):
            if message.type == "record batch":
                sizes.append(message.body.size)
            end = source.tell()
        source.seek(end)
        # A stream ends with a marker, which was shorter before Arrow 0.15.
        if source.read(9) not in (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0"):
            raise BadDataError(
                f"the stream does not end after its batch {len(sizes):,}: it is cut off, its "
                "writer was not closed, or another stream follows"
            )
        return sizes


def _ipc_batches(path: Path, columns: Collection[str], part: FilePart) -> Iterator[pa.RecordBatch]:
    # Memory-mapped: one record batch may be as large as the file.
    with pa.memory_map(str(path)) as source:
        names = _open_ipc(source).schema.names
        fields = [index for index, name in enumerate(names) if name in columns]
        reader = _open_ipc(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
        if isinstance(reader, pa.RecordBatchFileReader):
            numbers = range(reader.num_record_batches)[part.start : part.stop]
            yield from map(reader.get_batch, numbers)
        else:
            yield from islice(reader, part.start, part.stop)


def _ipc_rows(path: Path, columns: Collection[str], part: FilePart) -> Iterator[Row | BadRow]:
    return chain.from_iterable(map(batch_rows, _ipc_batches(path, columns, part)))


def batch_rows(batch: pa.RecordBatch) -> Iterator[Row | BadRow]:
    """The rows of a batch; ArrowInvalid if its offsets or indices are out of range."""
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):  # that error is reported for its row
                raise
    step = max(1, min(BATCH_ROWS, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, step):
        yield from _dicts(batch.slice(start, step))


def _dicts(batch: pa.RecordBatch) -> list[Row | BadRow]:
    try:
        columns = [_values(column) for column in batch.columns]
    except (ValueError, KeyError, ArithmeticError):
        return [_row_or_bad(batch, row) for row in range(batch.num_rows)]
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _row_or_bad(batch: pa.RecordBatch, row: int) -> Row | BadRow:
    cells: Row = {}
    for name in batch.schema.names:
        try:
            cells[name] = _values(batch.column(name).slice(row, 1))[0]
        except (ValueError, KeyError, ArithmeticError) as error:
            # It is not UTF-8, a map has a key twice, or Python has no such time or decimal.
            return BadRow("schema", f"{name!r} cannot be read: {error}")
    return cells


def _values(column: pa.Array) -> list[Any]:
    if not pa.types.is_nested(column.type):
        values: list[Any] = column.to_pylist()
        return values
    has_map = "map<" in str(column.type)  # maps_as_pydicts takes half as much time again
    options = {"maps_as_pydicts": "strict"} if has_map else {}
    return list(map(_without_nulls, column.to_pylist(**options)))


def _without_nulls(value: Any) -> Any:
    """The value without null keys: a columnar file's structs have the keys of all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return list(map(_without_nulls, value))
    return value


# Text, which may be compressed

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_TEXT_PER_BYTE = 4  # of a compressed file, estimated: the true size needs reading all of it


def open_bytes(path: Path) -> BufferedReader:
    """The bytes of a file, decompressed; a truncated compressed file raises OSError."""
    codec = _CODECS.get(path.suffix.lower())
    if codec is None:
        return path.open("rb")
    return BufferedReader(pa.input_stream(str(path), compression=codec), BLOCK_BYTES)


def _one_part(path: Path, _: Collection[str], __: int) -> list[FilePart]:
    size = path.stat().st_size
    return [
        WHOLE_FILE._replace(bytes=size * (_TEXT_PER_BYTE if path.suffix.lower() in _CODECS else 1))
    ]


# CSV


def _csv_cells(path: Path) -> Iterator[list[str]]:
    """The rows that are not blank, the header first; bytes that are not UTF-8 are surrogates."""
    # Python's limit refuses long answers; it is global, so it is set back afterwards.
    usual = csv.field_size_limit(MOST_CHARACTERS)
    with _open_text(path) as file:
        reader = csv.reader(file, strict=True, delimiter=_delimiter(path))
        try:
            yield from filter(None, reader)
        except csv.Error as error:
            raise BadDataError(f"line {reader.line_num:,} is not valid CSV ({error})") from None
        finally:
            csv.field_size_limit(usual)


def _open_text(path: Path) -> TextIOWrapper:
    # With newline="" line ends inside quotes stay as they are.
    return TextIOWrapper(open_bytes(path), "utf-8-sig", "surrogateescape", newline="")


def _delimiter(path: Path) -> str:
    """Tab for a TSV file; comma for a CSV file, or semicolon if its header has no comma."""
    if ".tsv" in path.suffixes[-2:]:
        return "\t"
    with _open_text(path) as file:
        header = ""
        while not header.strip() and (header := file.readline(BLOCK_BYTES)):
            pass
    return next((mark for mark in ",;\t" if mark in header), ",")


def _csv_columns(path: Path) -> tuple[str, ...]:
    rows = _csv_cells(path)
    header = next(rows, [])
    return tuple(header) if next(rows, None) else ()


def _csv_rows(path: Path, columns: Collection[str], part: FilePart) -> Iterator[Row | BadRow]:
    rows = _csv_cells(path)
    header = next(rows)
    for cells in rows:
        if len(cells) == len(header):
            yield dict(zip(header, cells, strict=True))
        else:
            detail = f"{len(cells)} cells under a header of {len(header)}: {shown(cells)}"
            yield BadRow("schema", detail)


# JSON


def _json_columns(path: Path) -> tuple[str, ...]:
    """The keys of the first rows, in the order of their appearance."""
    names: dict[str, None] = {}
    count = 0
    for row in islice(_json_rows(path, (), WHOLE_FILE), JSON_ROWS):
        count += 1
        names.update(dict.fromkeys(() if isinstance(row, BadRow) else row))
    if count and not names:
        raise BadDataError("the first rows are not JSON objects: write one object per line")
    return tuple(names)


def _json_parts(path: Path, columns: Collection[str], each: int) -> list[FilePart]:
    if path.suffix.lower() in _CODECS or not _is_lines(path):
        return _one_part(path, columns, each)
    size = path.stat().st_size
    count = max(1, -(-size // each))
    edges = [number * size // count for number in range(count + 1)]
    return [FilePart(start, stop, stop - start) for start, stop in pairwise(edges)]


def _json_rows(path: Path, columns: Collection[str], part: FilePart) -> Iterator[Row | BadRow]:
    """The rows; bytes that are not UTF-8 become surrogates, which the cells' checks refuse."""
    if _is_lines(path):
        for line in _lines(path, part):
            try:
                yield _object(json.loads(line.decode("utf-8", "surrogateescape")))
            except ValueError as error:
                yield BadRow("schema", f"no valid JSON ({error}): {shown(line)}")
            except RecursionError:
                yield BadRow("schema", TOO_DEEP)
    else:
        with open_bytes(path) as file:
            text = file.read().decode("utf-8-sig", "surrogateescape")
        yield from map(_object, _elements(text))


def _object(value: Any) -> Row | BadRow:
    return value if isinstance(value, dict) else BadRow("schema", f"no object: {shown(value)}")


def _is_lines(path: Path) -> bool:
    """Whether a file has one row per line; else it is an array, or an object around one."""
    with open_bytes(path) as file:
        start = file.peek().removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        if start != b"{" or ending_of(path.name).split(".")[1] != "json":
            return start != b"["
        first, *more = islice((line for line in file if not line.isspace()), 2)
    try:
        row = json.loads(first.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError):
        return False
    return bool(more) or not isinstance(row.get("data"), list)


def _lines(path: Path, part: FilePart) -> Iterator[bytes]:
    """The lines that begin in a part of a file, without blank ones."""
    with open_bytes(path) as file:
        position = part.start
        if position:
            file.seek(position - 1)
            position += len(file.readline()) - 1  # skips the line that begins before the part
        while position < part.stop and (line := file.readline()):
            text = line if position else line.removeprefix(codecs.BOM_UTF8)
            position += len(line)
            if text and not text.isspace():
                yield text


_raw_decode = json.JSONDecoder().raw_decode
_BEGIN, _NEXT = re.compile(r"\s*\[\s*"), re.compile(r"\s*,\s*")


def _elements(text: str) -> Iterator[Any]:
    """Each element of an array, parsed one at a time.

    An object whose only array is named "data" is parsed at once.
    """
    end, count, found = 0, 0, _BEGIN.match(text)
    if not found:
        try:
            inside = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadDataError(f"it holds neither JSON lines nor an array: {error}") from None
        rows = inside.pop("data", None)
        if not isinstance(rows, list) or any(isinstance(v, list | dict) for v in inside.values()):
            raise BadDataError("the object must hold one array, named 'data'")
        yield from rows
        return
    while found and (count or text[found.end() : found.end() + 1] != "]"):
        try:
            value, end = _raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise BadDataError(f"element {count:,} of the array cannot be read: {error}") from None
        yield value
        count, found = count + 1, _NEXT.match(text, end)
    if count and text[end:].strip() != "]":
        what = text[end : end + 99].strip()
        raise BadDataError(f"element {count - 1:,} of the array is followed by {shown(what)}")


_JSON = Reader(_json_columns, _json_parts, _json_rows)
_CSV = Reader(_csv_columns, _one_part, _csv_rows)
_TEXTS = {".jsonl": _JSON, ".ndjson": _JSON, ".json": _JSON, ".csv": _CSV, ".tsv": _CSV}
READERS = {
    ".parquet": Reader(_parquet_columns, _parquet_parts, _parquet_rows),
    **_TEXTS,
    **dict.fromkeys((".arrow", ".feather", ".ipc"), Reader(_ipc_columns, _ipc_parts, _ipc_rows)),
    **{f"{ending}{codec}": reader for ending, reader in _TEXTS.items() for codec in _CODECS},
}
_PLAIN = ", ".join(ending for ending in READERS if not ending.endswith((*_CODECS,)))
ENDINGS = f"{_PLAIN}, and those of text with {' or '.join(_CODECS)} behind them"


def ending_of(name: str) -> str:
    """The ending of a file's name, a key of READERS; empty if it is none of them."""
    return next((ending for ending in READERS if name.lower().endswith(ending)), "")
