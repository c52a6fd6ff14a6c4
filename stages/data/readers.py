"""Rows of a data file as dicts: Parquet, Arrow, CSV and JSON, whole or a part of the file."""

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

MOST_CHARACTERS = 16 << 20  # of a row: a tokenizer takes a hundred times the memory of its text
BATCH_BYTES = 8 << 20  # of a columnar file, as Python objects at once
BATCH_ROWS = 512
BLOCK_BYTES = 1 << 20
JSON_ROWS = 1000  # of which the keys are a JSON file's columns
TOO_DEEP = "a value is nested too deeply to be read"


class Piece(NamedTuple):
    """A part of a file that is read without the rest.

    Its unit is a row group of Parquet, a record batch of Arrow or a byte of JSON lines. A CSV file,
    a JSON array and a compressed file cannot be cut: each is one piece.
    """

    start: int
    stop: int
    bytes: int  # of data, before compression where that is known
    file: int = 0  # index of the input


WHOLE = Piece(0, sys.maxsize, 0)


class Reader(NamedTuple):
    """The functions that read files of one ending."""

    columns: Callable[[Path], tuple[str, ...]]  # none if the file has no rows
    # As small as the file can be cut; lines are cut into so many bytes.
    pieces: Callable[[Path, Collection[str], int], list[Piece]]
    # Text files give all columns of a row, columnar ones those that are asked for.
    rows: Callable[[Path, Collection[str], Piece], Iterator[Row | BadRow]]


# Parquet


def _parquet_columns(path: Path) -> tuple[str, ...]:
    with pq.ParquetFile(path, memory_map=False) as file:
        return tuple(file.schema_arrow.names) if file.metadata.num_rows else ()


def _parquet_pieces(path: Path, columns: Collection[str], _: int) -> list[Piece]:
    with pq.ParquetFile(path, memory_map=False) as file:
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        sizes = [_group_bytes(group, columns) for group in groups]
    return [Piece(number, number + 1, size) for number, size in enumerate(sizes)]


def _group_bytes(group: pq.RowGroupMetaData, columns: Collection[str]) -> int:
    """The uncompressed size of these columns."""
    chunks = map(group.column, range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema.split(".", 1)[0] in columns
    )


def _parquet_rows(path: Path, columns: Collection[str], piece: Piece) -> Iterator[Row | BadRow]:
    # Without buffer_size a whole column chunk is in memory; with pre_buffer the whole file.
    options = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}
    with pq.ParquetFile(path, memory_map=False, **options) as file:
        wanted = [name for name in file.schema_arrow.names if name in columns]
        for number in range(piece.start, min(piece.stop, file.num_row_groups)):
            group, found = file.metadata.row_group(number), 0
            bytes_per_row = max(1, _group_bytes(group, wanted) // max(1, group.num_rows))
            size = max(1, min(BATCH_ROWS, BATCH_BYTES // bytes_per_row))
            # Threads would each keep freed memory, and the cores belong to the tokenizers.
            for batch in file.iter_batches(size, [number], wanted, use_threads=False):
                found += batch.num_rows
                yield from batch_rows(batch)
            if found != group.num_rows:  # Arrow says nothing of rows that a damaged page lacks
                raise BadDataError(
                    f"row group {number:,} holds {found:,} rows, and its footer {group.num_rows:,}"
                )


# Arrow


def _open_ipc(source: pa.NativeFile, **options: Any) -> Any:
    """A reader of an Arrow file or stream, whichever it is."""
    source.seek(0)
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    opener: Callable[..., Any] = pa.ipc.open_file if is_file else pa.ipc.open_stream
    return opener(source, **options)


def _ipc_columns(path: Path) -> tuple[str, ...]:
    sizes = _ipc_sizes(path)
    with pa.memory_map(str(path)) as source:
        names = tuple(_open_ipc(source).schema.names)
    batches = _ipc_batches(path, names[:1], WHOLE) if sizes else ()
    return names if any(batch.num_rows for batch in batches) else ()


def _ipc_pieces(path: Path, _: Collection[str], __: int) -> list[Piece]:
    return [Piece(number, number + 1, size) for number, size in enumerate(_ipc_sizes(path))]


def _ipc_sizes(path: Path) -> list[int]:
    """The bytes of each record batch; in a file all are taken as equal."""
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
        # A stream ends with a marker, the shorter one as before Arrow 0.15.
        if source.read(9) not in (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0"):
            raise BadDataError(
                f"the stream does not end behind its batch {len(sizes):,}: it is cut off, its "
                "writer was not closed, or another stream follows"
            )
        return sizes


def _ipc_batches(path: Path, columns: Collection[str], piece: Piece) -> Iterator[pa.RecordBatch]:
    # Mapped, not read: one record batch may be as large as the file.
    with pa.memory_map(str(path)) as source:
        names = _open_ipc(source).schema.names
        fields = [index for index, name in enumerate(names) if name in columns]
        reader = _open_ipc(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
        if isinstance(reader, pa.RecordBatchFileReader):
            numbers = range(reader.num_record_batches)[piece.start : piece.stop]
            yield from map(reader.get_batch, numbers)
        else:
            yield from islice(reader, piece.start, piece.stop)


def _ipc_rows(path: Path, columns: Collection[str], piece: Piece) -> Iterator[Row | BadRow]:
    return chain.from_iterable(map(batch_rows, _ipc_batches(path, columns, piece)))


def batch_rows(batch: pa.RecordBatch) -> Iterator[Row | BadRow]:
    """The rows of a batch; ArrowInvalid if its offsets or indices lead out of it."""
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):  # which is reported for its row
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
    has_map = "map<" in str(column.type)  # asking for them costs half as much again
    options = {"maps_as_pydicts": "strict"} if has_map else {}
    return list(map(_without_nulls, column.to_pylist(**options)))


def _without_nulls(value: Any) -> Any:
    """A struct of a columnar file has the keys of all its rows; those this one lacks are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return list(map(_without_nulls, value))
    return value


# Text, which may be compressed

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_TEXT_PER_BYTE = 4  # of a compressed file, about; how much exactly only reading all of it tells


def open_bytes(path: Path) -> BufferedReader:
    """The bytes of a file, decompressed; a compressed file that was cut is an OSError."""
    codec = _CODECS.get(path.suffix.lower())
    if codec is None:
        return path.open("rb")
    return BufferedReader(pa.input_stream(str(path), compression=codec), BLOCK_BYTES)


def _one_piece(path: Path, _: Collection[str], __: int) -> list[Piece]:
    size = path.stat().st_size
    return [WHOLE._replace(bytes=size * (_TEXT_PER_BYTE if path.suffix.lower() in _CODECS else 1))]


# CSV


def _csv_cells(path: Path) -> Iterator[list[str]]:
    """The rows that are not blank, the header first; bytes that are no text are surrogates."""
    # Python's own limit ends files with long answers; it is the process's, and others keep theirs.
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
    """Tabs of a TSV file; of a CSV file commas, unless its header has none but semicolons."""
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


def _csv_rows(path: Path, columns: Collection[str], piece: Piece) -> Iterator[Row | BadRow]:
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
    for row in islice(_json_rows(path, (), WHOLE), JSON_ROWS):
        count += 1
        names.update(dict.fromkeys(() if isinstance(row, BadRow) else row))
    if count and not names:
        raise BadDataError("the first rows are not JSON objects: write one object per line")
    return tuple(names)


def _json_pieces(path: Path, columns: Collection[str], each: int) -> list[Piece]:
    if path.suffix.lower() in _CODECS or not _is_lines(path):
        return _one_piece(path, columns, each)
    size = path.stat().st_size
    count = max(1, -(-size // each))
    edges = [number * size // count for number in range(count + 1)]
    return [Piece(start, stop, stop - start) for start, stop in pairwise(edges)]


def _json_rows(path: Path, columns: Collection[str], piece: Piece) -> Iterator[Row | BadRow]:
    """The rows; bytes that are no text are surrogates, which are refused where a cell is read."""
    if _is_lines(path):
        for line in _lines(path, piece):
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
    """Whether a file has a row in each line, and is neither an array nor an object around one."""
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


def _lines(path: Path, piece: Piece) -> Iterator[bytes]:
    """The lines that begin in a piece of a file, without blank ones."""
    with open_bytes(path) as file:
        position = piece.start
        if position:
            file.seek(position - 1)
            position += len(file.readline()) - 1  # the rest of a line that begins before it
        while position < piece.stop and (line := file.readline()):
            text = line if position else line.removeprefix(codecs.BOM_UTF8)
            position += len(line)
            if text and not text.isspace():
                yield text


_raw_decode = json.JSONDecoder().raw_decode
_BEGIN, _NEXT = re.compile(r"\s*\[\s*"), re.compile(r"\s*,\s*")


def _elements(text: str) -> Iterator[Any]:
    """Each element of an array, which are never all held as values.

    An object around an array named "data", beside which it has no other, is read as a whole.
    """
    end, count, found = 0, 0, _BEGIN.match(text)
    if not found:
        try:
            inside = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadDataError(f"it holds no lines and no array of objects: {error}") from None
        rows = inside.pop("data", None)
        if not isinstance(rows, list) or any(isinstance(v, list | dict) for v in inside.values()):
            raise BadDataError("the object holds other things than one array named 'data'")
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


_JSON = Reader(_json_columns, _json_pieces, _json_rows)
_CSV = Reader(_csv_columns, _one_piece, _csv_rows)
_TEXTS = {".jsonl": _JSON, ".ndjson": _JSON, ".json": _JSON, ".csv": _CSV, ".tsv": _CSV}
READERS = {
    ".parquet": Reader(_parquet_columns, _parquet_pieces, _parquet_rows),
    **_TEXTS,
    **dict.fromkeys((".arrow", ".feather", ".ipc"), Reader(_ipc_columns, _ipc_pieces, _ipc_rows)),
    **{f"{ending}{codec}": reader for ending, reader in _TEXTS.items() for codec in _CODECS},
}
_PLAIN = ", ".join(ending for ending in READERS if not ending.endswith((*_CODECS,)))
ENDINGS = f"{_PLAIN}, and those of text with {' or '.join(_CODECS)} behind them"


def ending_of(name: str) -> str:
    """The ending of a file's name, a key of READERS; nothing if it is none of them."""
    return next((ending for ending in READERS if name.lower().endswith(ending)), "")
