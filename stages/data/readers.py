"""Rows of a data file as dicts: Parquet, Arrow, CSV and JSON, whole or a part of the file."""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from io import BufferedReader, TextIOWrapper
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import BadDataError
from ...schemas.rows import BadRow
from .cells import require_characters, shown

Row: TypeAlias = "dict[str, Any]"  # the user's column: its value

MOST_BYTES = 16 << 20  # of a row: a tokenizer takes a hundred times as much memory as its text
BATCH_BYTES = 8 << 20  # of a columnar file, as Python objects at once
BATCH_ROWS = 512
BLOCK_BYTES = 1 << 20
JSON_ROWS = 1000  # of which the keys are a JSON file's columns
TOO_DEEP = "a value is nested too deeply to be read"


class Part(NamedTuple):
    """A part of a file that is read without the rest.

    Its unit is a row group of Parquet, a record batch of Arrow or a byte of JSON lines. Any other
    file is one part.
    """

    start: int
    stop: int
    bytes: int  # of data, approximately


WHOLE = Part(0, sys.maxsize, 0)


class Reader(NamedTuple):
    """The functions that read files of one ending."""

    columns: Callable[[Path], tuple[str, ...]]  # none if the file has no rows
    # Of at most so many bytes in these columns, as far as the file can be cut.
    parts: Callable[[Path, Collection[str], int], list[Part]]
    # Text files give all columns of a row, columnar ones those that are asked for.
    rows: Callable[[Path, Collection[str], Part], Iterator[Row | BadRow]]


def too_large(size: int) -> BadRow:
    """The refusal of a row by its bytes or characters."""
    return BadRow("too_large", f"the row holds {size:,} bytes, and {MOST_BYTES:,} are the most")


def _joined(sizes: Iterable[int], most: int) -> list[Part]:
    """Consecutive units of a file, joined up to `most` bytes."""
    parts: list[Part] = []
    for number, size in enumerate(sizes):
        last = parts[-1] if parts else None
        if last and last.bytes + size <= most:
            parts[-1] = Part(last.start, number + 1, last.bytes + size)
        else:
            parts.append(Part(number, number + 1, size))
    return parts


# Parquet


def _parquet_columns(path: Path) -> tuple[str, ...]:
    with pq.ParquetFile(path, memory_map=False) as file:
        return tuple(file.schema_arrow.names) if file.metadata.num_rows else ()


def _parquet_parts(path: Path, columns: Collection[str], most: int) -> list[Part]:
    with pq.ParquetFile(path, memory_map=False) as file:
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        return _joined((_group_bytes(group, columns) for group in groups), most)


def _group_bytes(group: pq.RowGroupMetaData, columns: Collection[str]) -> int:
    """The uncompressed size of these columns."""
    chunks = map(group.column, range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema.split(".", 1)[0] in columns
    )


def _parquet_rows(path: Path, columns: Collection[str], part: Part) -> Iterator[Row | BadRow]:
    # Without buffer_size a whole column chunk is in memory; with pre_buffer the whole file.
    options = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}
    with pq.ParquetFile(path, memory_map=False, **options) as file:
        wanted = [name for name in file.schema_arrow.names if name in columns]
        for number in range(part.start, min(part.stop, file.num_row_groups)):
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


def _open_ipc(source: pa.NativeFile, columns: Collection[str] | None = None) -> Any:
    """A reader of an Arrow file or stream, whichever it is, with these columns."""
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    opener: Callable[..., Any] = pa.ipc.open_file if is_file else pa.ipc.open_stream
    if columns is None:
        return opener(source)
    names = opener(source).schema.names
    source.seek(0)
    fields = [index for index, name in enumerate(names) if name in columns]
    return opener(source, options=pa.ipc.IpcReadOptions(included_fields=fields))


def _ipc_batches(source: pa.NativeFile, columns: Collection[str], part: Part) -> Iterator[Any]:
    reader = _open_ipc(source, columns)
    if isinstance(reader, pa.RecordBatchFileReader):
        stop = min(part.stop, reader.num_record_batches)
        return map(reader.get_batch, range(part.start, stop))
    return islice(reader, part.start, part.stop)


def _ipc_columns(path: Path) -> tuple[str, ...]:
    if not _ipc_sizes(path):
        return ()
    with pa.memory_map(str(path)) as source:
        names = _open_ipc(source).schema.names
        source.seek(0)
        has_rows = any(batch.num_rows for batch in _ipc_batches(source, names[:1], WHOLE))
        return tuple(names) if has_rows else ()


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


def _ipc_parts(path: Path, columns: Collection[str], most: int) -> list[Part]:
    return _joined(_ipc_sizes(path), most)


def _ipc_rows(path: Path, columns: Collection[str], part: Part) -> Iterator[Row | BadRow]:
    # Mapped, not read: one record batch may be as large as the file.
    with pa.memory_map(str(path)) as source:
        for batch in _ipc_batches(source, columns, part):
            yield from batch_rows(batch)


def batch_rows(batch: pa.RecordBatch) -> Iterator[Row | BadRow]:
    """The rows of a batch; ArrowInvalid if its offsets or indices lead out of it."""
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):  # which is reported for its row
                raise
    bytes_per_row = max(1, batch.nbytes // max(1, batch.num_rows))
    step = max(1, min(BATCH_ROWS, BATCH_BYTES // bytes_per_row))
    for start in range(0, batch.num_rows, step):
        part = batch.slice(start, step)
        rows = _dicts(part)
        if part.nbytes <= MOST_BYTES:
            yield from rows
            continue
        for row in rows:  # a dictionary counts as a whole there, so only their own text decides
            size = 0 if isinstance(row, BadRow) else _size(row)
            yield row if size <= MOST_BYTES else too_large(size)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value
    return sum(map(_size, inner)) if isinstance(value, dict | list) else 0


def _dicts(batch: pa.RecordBatch) -> list[Row | BadRow]:
    names = batch.schema.names
    try:
        columns = [_values(column) for column in batch.columns]
    except (ValueError, KeyError, ArithmeticError):
        return [_row_or_bad(batch, row) for row in range(batch.num_rows)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _row_or_bad(batch: pa.RecordBatch, row: int) -> Row | BadRow:
    cells: Row = {}
    for name in batch.schema.names:
        try:
            cells[name] = _values(batch.column(name).slice(row, 1))[0]
        except UnicodeDecodeError as error:
            detail = f"byte {error.start} of {name!r} is not UTF-8: {shown(error.object)}"
            return BadRow("schema", detail)
        except (ValueError, KeyError, ArithmeticError) as error:
            is_twice = "duplicate" in str(error)  # else it is a time or a decimal that Python lacks
            what = "has an object with a key twice" if is_twice else "cannot be read"
            return BadRow("schema", f"{name!r} {what}: {error}")
    return cells


def _values(column: pa.Array) -> list[Any]:
    if not pa.types.is_nested(column.type):
        values: list[Any] = column.to_pylist()
        return values
    if _has_map(column.type):  # asking for it costs half as much again
        return list(map(_without_nulls, column.to_pylist(maps_as_pydicts="strict")))
    return list(map(_without_nulls, column.to_pylist()))


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    return any(_has_map(kind.field(index).type) for index in range(kind.num_fields))


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


def _one_part(path: Path, columns: Collection[str], most: int) -> list[Part]:
    size = path.stat().st_size
    return [Part(0, sys.maxsize, size * (_TEXT_PER_BYTE if path.suffix.lower() in _CODECS else 1))]


def _checked(row: Row, columns: Collection[str]) -> Row | BadRow:
    """The row, if the cells that are read have no lone surrogates."""
    try:
        for column in columns:
            require_characters(row.get(column), column)
    except BadRow as bad:
        return bad
    except RecursionError:
        return BadRow("schema", TOO_DEEP)
    return row


# CSV


def _csv_cells(path: Path) -> Iterator[list[str]]:
    """The rows that are not blank, the header first; bytes that are no text are surrogates."""
    # Python's own limit ends files with long answers; it is the process's, and others keep theirs.
    usual = csv.field_size_limit(MOST_BYTES)
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


def _csv_rows(path: Path, columns: Collection[str], part: Part) -> Iterator[Row | BadRow]:
    rows = _csv_cells(path)
    header = next(rows)
    for cells in rows:
        if (size := sum(map(len, cells))) > MOST_BYTES:
            yield too_large(size)
        elif len(cells) != len(header):
            detail = f"{len(cells)} cells under a header of {len(header)}: {shown(cells)}"
            yield BadRow("schema", detail)
        else:
            yield _checked(dict(zip(header, cells, strict=True)), columns)


# JSON

_raw_decode = json.JSONDecoder().raw_decode
_BLANK = re.compile(r"[ \t\n\r]*")
# An object whose rows are the array "data", with nothing but short facts before it.
_FACT = r'\s*"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)\s*,'
_DATA = re.compile(rf'\s*\{{(?:{_FACT})*\s*"data"\s*:\s*(?=\[)')


def _json_columns(path: Path) -> tuple[str, ...]:
    """The keys of the first rows, in the order of their appearance."""
    names: dict[str, None] = {}
    count = 0
    for row in islice(_json_rows(path, (), WHOLE), JSON_ROWS):
        count += 1
        names.update(() if isinstance(row, BadRow) else dict.fromkeys(row))
    if count and not names:
        raise BadDataError("the first rows are not JSON objects: write one object per line")
    return tuple(names)


def _json_parts(path: Path, columns: Collection[str], most: int) -> list[Part]:
    if path.suffix.lower() in _CODECS or not _is_lines(path):
        return _one_part(path, columns, most)
    size = path.stat().st_size
    count = max(1, -(-size // most))
    edges = [number * size // count for number in range(count + 1)]
    return [Part(start, stop, stop - start) for start, stop in pairwise(edges)]


def _json_rows(path: Path, columns: Collection[str], part: Part) -> Iterator[Row | BadRow]:
    if _is_lines(path):
        for line in _lines(path, part):
            yield _line_row(line, columns)
        return
    with open_bytes(path) as file:
        content = file.read()
    try:
        text, is_damaged = content.decode("utf-8-sig"), False
    except UnicodeDecodeError:
        text, is_damaged = content.decode("utf-8-sig", "surrogateescape"), True
    del content
    for start, end, row in _elements(text):
        if end - start > MOST_BYTES:
            yield too_large(end - start)
        elif is_damaged and _has_surrogates(text[start:end]):
            yield BadRow("schema", "the row has bytes that are not UTF-8")
        elif not isinstance(row, dict):
            yield BadRow("schema", f"no JSON object: {shown(row)}")
        else:
            has_escapes = text.find("\\u", start, end) >= 0
            yield _checked(row, columns) if has_escapes else row


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _line_row(line: bytes, columns: Collection[str]) -> Row | BadRow:
    if len(line) > MOST_BYTES:
        return too_large(len(line))
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRow("schema", f"byte {error.start} of the row is not UTF-8")
    except ValueError as error:
        return BadRow("schema", f"no valid JSON ({error}): {shown(line)}")
    except RecursionError:
        return BadRow("schema", TOO_DEEP)
    if not isinstance(row, dict):
        return BadRow("schema", f"no JSON object: {shown(row)}")
    return _checked(row, columns) if b"\\u" in line else row


def _is_lines(path: Path) -> bool:
    """Whether a file has one record per line, and is neither an array nor an object around one."""
    with open_bytes(path) as file:
        block = file.read(BLOCK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
        while not block and (block := file.read(BLOCK_BYTES)):
            block = block.lstrip()
    if block[:1] != b"{":
        return block[:1] != b"["
    text = block.decode("utf-8", "replace")
    if not _DATA.match(text):
        return True
    # Lines may begin with an array named "data": then an object ends in its line, and more follow.
    try:
        _, end = _raw_decode(text)
    except (ValueError, RecursionError):
        return False
    rest = text[end:].lstrip(" \t\r")
    return rest.startswith("\n") and not rest.isspace()


def _lines(path: Path, part: Part) -> Iterator[bytes]:
    """The lines that begin in a part of a file, without blank ones."""
    with open_bytes(path) as file:
        position = part.start
        if position:
            file.seek(position - 1)
            position += len(file.readline()) - 1  # the rest of a line that begins before the part
        while position < part.stop and (line := file.readline()):
            text = line if position else line.removeprefix(codecs.BOM_UTF8)
            position += len(line)
            if text and not text.isspace():
                yield text


def _elements(text: str) -> Iterator[tuple[int, int, Any]]:
    """Where each element of the array begins and ends, and its value."""
    inside = _DATA.match(text)
    at = _behind_blanks(text, inside.end() if inside else 0)
    at = _behind_blanks(text, at + 1)
    count = 0
    is_more = text[at : at + 1] != "]"
    while is_more:
        try:
            value, end = _raw_decode(text, at)
        except json.JSONDecodeError as error:
            is_cut = error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip())
            what = "is cut off" if is_cut else f"is not valid JSON ({error.msg})"
            raise _broken(count, what) from None
        except (RecursionError, ValueError) as error:
            raise _broken(count, f"cannot be read ({error})") from None
        yield at, end, value
        count += 1
        at = _behind_blanks(text, end)
        is_more = text[at : at + 1] == ","
        at = _behind_blanks(text, at + 1) if is_more else at
    if text[at : at + 1] != "]":
        raise _broken(count - 1, f"is followed by {text[at : at + 1]!r}")
    rest = text[at + 1 :].strip()
    if inside and rest[:1] != "}":
        raise BadDataError(
            "the object goes on after its array 'data': write a file of the array alone"
        )
    if rest[1 if inside else 0 :].strip():
        raise BadDataError(f"after the closing bracket of {count:,} elements comes {rest[-1]!r}")


def _behind_blanks(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return blank.end() if blank else at


def _broken(index: int, what: str) -> BadDataError:
    return BadDataError(f"element {index:,} of the array {what}, so the rest cannot be read")


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
    """The ending of a file's name, a key of READERS; nothing if it is none of them."""
    return next((ending for ending in READERS if name.lower().endswith(ending)), "")
