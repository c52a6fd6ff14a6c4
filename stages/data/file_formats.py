"""The file formats: the columns of a file, its ranges, and its rows in bounded payloads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import BinaryIO, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import BadDataError
from .arrow_batches import (
    batch_sizes,
    bounded,
    column_names_in,
    joined,
    open_batches,
    require_all_batches,
)
from .csv_files import csv_rows
from .json_files import is_json_lines, json_rows, keys_of
from .large_rows import MIB, MOST_ROW_BYTES, LongRow, LongRows, is_undecodable, too_large
from .packed_files import PACKED, is_packed, text_bytes
from .parquet_footer import Group, read_groups
from .parquet_pages import repeats_a_text, rows_at_once

Item = TypeVar("Item")
SAMPLED_JSON_ROWS = 100


@dataclass(frozen=True)
class Limit:
    """The most rows and bytes of a payload, and the most bytes of a row that is read."""

    rows: int
    bytes: int
    row_bytes: int = MOST_ROW_BYTES


@dataclass(frozen=True)
class FileRange:
    """A range of a file that can be read without the rest: from `start` to `stop`.

    The unit is a byte of JSON lines, a row group of Parquet or a batch of Arrow. Any other file can
    only be read from its beginning and is one range.
    """

    start: int
    stop: int
    bytes: int  # of data, approximately


WHOLE = FileRange(0, sys.maxsize, 0)


@dataclass(frozen=True)
class JsonRows:
    """Rows of a JSON file, each as its raw text."""

    texts: list[bytes]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class CsvRows:
    """Rows of a CSV file; bytes that are not UTF-8 are lone surrogates in the cells."""

    header: tuple[str, ...]
    rows: list[list[str]]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class ArrowRows:
    """Rows of a columnar file."""

    batch: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def __reduce__(self) -> tuple[Callable[[bytes], ArrowRows], tuple[bytes]]:
        # pickle would copy the whole buffers that a slice points into; IPC writes the slice.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.batch.schema) as stream:
            stream.write_batch(self.batch)
        return _arrow_rows, (sink.getvalue().to_pybytes(),)


def _arrow_rows(stream: bytes) -> ArrowRows:
    return ArrowRows(pa.ipc.open_stream(stream).read_next_batch())


Payload: TypeAlias = JsonRows | CsvRows | ArrowRows | LongRows


@dataclass(frozen=True)
class Format:
    """The functions that read one kind of file."""

    columns: Callable[[Path], tuple[str, ...]]  # empty when the file has no rows
    # Ranges of at most this many bytes, as far as the file can be cut.
    ranges: Callable[[Path, Collection[str], int], list[FileRange]]
    payloads: Callable[[Path, Collection[str], Limit, FileRange], Iterator[Payload]]


def _joined(sizes: Iterable[int], most: int) -> list[FileRange]:
    """The ranges of consecutive parts of a file, joined up to `most` bytes."""
    ranges: list[FileRange] = []
    for number, size in enumerate(sizes):
        last = ranges[-1] if ranges else None
        if last and last.bytes + size <= most:
            ranges[-1] = FileRange(last.start, number + 1, last.bytes + size)
        else:
            ranges.append(FileRange(number, number + 1, size))
    return ranges


def _one_range(path: Path, columns: Collection[str], most: int) -> list[FileRange]:
    return [FileRange(0, sys.maxsize, text_bytes(path))]


def parquet_columns(path: Path) -> tuple[str, ...]:
    """The column names of a Parquet file."""
    with pq.ParquetFile(path, memory_map=False) as file:
        rows = sum(group.rows for group in read_groups(path))
        _require_rows(rows, file.metadata.num_rows, "its row groups name")
        return tuple(file.schema_arrow.names) if file.metadata.num_rows else ()


def _require_rows(rows: int, promised: int, what: str) -> None:
    if rows != promised:
        raise BadDataError(f"{what} {rows:,} rows, and its footer {promised:,}")


def parquet_ranges(path: Path, columns: Collection[str], most: int) -> list[FileRange]:
    """The ranges of a Parquet file, cut between row groups."""
    return _joined((_bytes_of(group, columns) for group in read_groups(path)), most)


def parquet_payloads(
    path: Path, columns: Collection[str], limit: Limit, file_range: FileRange
) -> Iterator[ArrowRows | LongRows]:
    """Yields the rows of a Parquet file, row group by row group."""
    # Without buffer_size a whole column chunk is in memory; with pre_buffer the whole file.
    way = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}
    with pq.ParquetFile(path, memory_map=False, **way) as file, path.open("rb") as raw:
        wanted = [name for name in file.schema_arrow.names if name in columns]
        groups = read_groups(path)
        encoded = [name for name in wanted if _is_encoded(file.schema_arrow.field(name).type)]
        for group in range(file_range.start, min(file_range.stop, len(groups))):
            promised, found = groups[group], 0
            _require_distinct(raw, promised, encoded)
            rows = _rows_per_batch(promised, wanted, limit)
            try:
                few = _rows_at_once(raw, promised, wanted, rows, limit)
            except _TooMuchAtOnceError as error:
                yield LongRows((str(error),) * promised.rows)
                continue
            # Threads would each keep freed memory, and the cores belong to the tokenizers.
            batches = file.iter_batches(few, [group], wanted, use_threads=False)
            for batch in batches if few == rows else joined(batches, rows):
                found += batch.num_rows
                yield from _payloads_of(batch, limit)
            _require_rows(found, promised.rows, f"row group {group:,} holds")


def _is_encoded(kind: pa.DataType) -> bool:
    """Whether texts are read as places in a dictionary."""
    inner = (kind.field(index).type for index in range(kind.num_fields))
    return bool(pa.types.is_dictionary(kind)) or any(map(_is_encoded, inner))


def _require_distinct(raw: BinaryIO, group: Group, encoded: Collection[str]) -> None:
    for chunk in group.of(encoded):
        if repeats_a_text(raw, chunk):
            raise BadDataError(f"the dictionary of {chunk.path!r} holds a text twice")


class _TooMuchAtOnceError(Exception):
    """A row group with a page that would fill the memory for a few rows."""


def _payloads_of(batch: pa.RecordBatch, limit: Limit) -> Iterator[ArrowRows | LongRows]:
    for part in bounded(batch, rows=limit.rows, size=limit.bytes, most_row=limit.row_bytes):
        yield part if isinstance(part, LongRows) else ArrowRows(part)


def _rows_per_batch(group: Group, wanted: Collection[str], limit: Limit) -> int:
    bytes_per_row = max(1, _bytes_of(group, wanted) // max(1, group.rows))
    rows: int = limit.bytes // bytes_per_row
    return max(1, min(limit.rows, rows))


def _rows_at_once(
    raw: BinaryIO,
    group: Group,
    wanted: Collection[str],
    rows: int,
    limit: Limit,
) -> int:
    """How many of so many rows may be decoded at once, by what the pages say of themselves."""
    few = float(rows)
    for chunk in group.of(wanted):
        most, page = rows_at_once(raw, chunk, group.rows, few)
        if is_undecodable(page.size, page.values, limit.row_bytes):
            raise _TooMuchAtOnceError(
                f"a page of {chunk.path!r} in its row group of {group.rows:,} rows "
                f"holds {page.size / MIB:,.0f} MiB in {page.values:,} values, which is not decoded"
            )
        # A group with fewer rows than are wanted may be decoded whole.
        few = few if most >= group.rows else min(few, most)
    return max(1, int(few))


def _bytes_of(group: Group, wanted: Collection[str]) -> int:
    """The uncompressed size of these columns."""
    return sum(chunk.size for chunk in group.of(wanted))


def arrow_columns(path: Path) -> tuple[str, ...]:
    """The column names of an Arrow IPC file or stream."""
    require_all_batches(path)
    return column_names_in(path) if any(size.rows for size in batch_sizes(path)) else ()


def arrow_ranges(path: Path, columns: Collection[str], most: int) -> list[FileRange]:
    """The ranges of an Arrow IPC file or stream, cut between record batches by rows."""
    rows = [size.rows for size in batch_sizes(path)]
    bytes_per_row = path.stat().st_size / max(1, sum(rows))
    return _joined((int(count * bytes_per_row) for count in rows), most)


def arrow_payloads(
    path: Path, columns: Collection[str], limit: Limit, file_range: FileRange
) -> Iterator[ArrowRows | LongRows]:
    """Yields the rows of an Arrow IPC file or stream."""
    sizes = batch_sizes(path)
    is_large = [is_undecodable(size.decompressed, size.rows, limit.row_bytes) for size in sizes]
    numbers = range(file_range.start, min(file_range.stop, len(sizes)))
    # Mapped, not read: one record batch may be as large as the file.
    with pa.memory_map(str(path)) as source:
        batches = open_batches(source, columns, numbers, is_large)
        for size, batch in zip(map(sizes.__getitem__, numbers), batches, strict=True):
            if batch is None:
                why = f"its batch of {size.rows:,} rows holds {size.decompressed / MIB:,.0f} MiB"
                yield LongRows((f"{why}, which is not decompressed",) * size.rows)
            else:
                yield from _payloads_of(batch, limit)


def csv_columns(path: Path) -> tuple[str, ...]:
    """The header of a CSV file."""
    rows = csv_rows(path)
    header = next(rows, [])
    if isinstance(header, LongRow):
        raise BadDataError(f"its header is too long: {too_large(header.bytes, MOST_ROW_BYTES)}")
    return tuple(header) if next(rows, None) else ()


def csv_payloads(
    path: Path, columns: Collection[str], limit: Limit, file_range: FileRange
) -> Iterator[CsvRows | LongRows]:
    """Yields the rows of a CSV file, all columns of them, so that cells can be counted."""
    rows = csv_rows(path, limit.row_bytes)
    header = next(rows)
    if isinstance(header, LongRow):
        raise BadDataError(f"its header is too long: {too_large(header.bytes, limit.row_bytes)}")
    for group in _groups(rows, lambda row: sum(map(len, row)), limit):
        yield group if isinstance(group, LongRows) else CsvRows(tuple(header), group)


def json_columns(path: Path) -> tuple[str, ...]:
    """The keys of the first rows of a JSON file, in the order of their appearance."""
    names: dict[str, None] = {}
    count = 0
    for text in islice(json_rows(path), SAMPLED_JSON_ROWS):
        count += 1
        if not isinstance(text, LongRow):
            names.update(dict.fromkeys(keys_of(text)))
    if count and not names:
        raise BadDataError("the first rows are not JSON objects: write one object per line")
    return tuple(names)


def json_ranges(path: Path, columns: Collection[str], most: int) -> list[FileRange]:
    """The ranges of JSON lines, cut at any byte; an array or a compressed file is one range."""
    if is_packed(path) or not is_json_lines(path):
        return _one_range(path, columns, most)
    size = path.stat().st_size
    count = max(1, -(-size // most))
    edges = [number * size // count for number in range(count + 1)]
    return [FileRange(start, stop, stop - start) for start, stop in pairwise(edges)]


def json_payloads(
    path: Path, columns: Collection[str], limit: Limit, file_range: FileRange
) -> Iterator[JsonRows | LongRows]:
    """Yields the rows of a JSON file; they are parsed where they are checked."""
    rows = json_rows(path, start=file_range.start, stop=file_range.stop, most=limit.row_bytes)
    for group in _groups(rows, len, limit):
        yield group if isinstance(group, LongRows) else JsonRows(group)


def _groups(
    items: Iterable[Item | LongRow], size_of: Callable[[Item], int], limit: Limit
) -> Iterator[list[Item] | LongRows]:
    group: list[Item] = []
    size = 0
    for item in items:
        if not isinstance(item, LongRow):
            group.append(item)
            size += size_of(item)
            if len(group) < limit.rows and size < limit.bytes:
                continue
        if group:
            yield group
            group, size = [], 0
        if isinstance(item, LongRow):
            yield LongRows((too_large(item.bytes, limit.row_bytes),))
    if group:
        yield group


ARROW = (".arrow", ".feather", ".ipc")
_CSV = Format(csv_columns, _one_range, csv_payloads)
_TEXTS = {
    **dict.fromkeys(
        (".jsonl", ".ndjson", ".json"), Format(json_columns, json_ranges, json_payloads)
    ),
    **dict.fromkeys((".csv", ".tsv"), _CSV),
}
FORMATS = {
    ".parquet": Format(parquet_columns, parquet_ranges, parquet_payloads),
    **_TEXTS,
    **dict.fromkeys(ARROW, Format(arrow_columns, arrow_ranges, arrow_payloads)),
    **{f"{ending}{packed}": way for ending, way in _TEXTS.items() for packed in PACKED},
}


def ending_of(name: str) -> str:
    """The ending of a file's name, a key of FORMATS; nothing if it is none of them."""
    return next((ending for ending in FORMATS if name.lower().endswith(ending)), "")
