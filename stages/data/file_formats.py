"""The file formats: the columns of a file, its ranges, and its rows in bounded payloads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import BadDataError
from .arrow_batches import batch_sizes, bounded, filled_columns, open_batches
from .csv_files import csv_rows
from .json_files import is_json_lines, json_rows, keys_of
from .packed_files import PACKED, is_packed, text_bytes

Item = TypeVar("Item")
SAMPLED_JSON_ROWS = 100


@dataclass(frozen=True)
class Limit:
    """The most rows and bytes of a payload; a row that holds more is alone in one."""

    rows: int
    bytes: int


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


Payload: TypeAlias = JsonRows | CsvRows | ArrowRows


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
        return tuple(file.schema_arrow.names) if file.metadata.num_rows else ()


def parquet_ranges(path: Path, columns: Collection[str], most: int) -> list[FileRange]:
    """The ranges of a Parquet file, cut between row groups."""
    with pq.ParquetFile(path, memory_map=False) as file:
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        return _joined((_bytes_of(group, columns) for group in groups), most)


def parquet_payloads(
    path: Path, columns: Collection[str], limit: Limit, file_range: FileRange
) -> Iterator[ArrowRows]:
    """Yields the rows of a Parquet file, row group by row group."""
    # Without buffer_size a whole column chunk is in memory; with pre_buffer the whole file.
    way = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}
    with pq.ParquetFile(path, memory_map=False, **way) as file:
        wanted = [name for name in file.schema_arrow.names if name in columns]
        for number in range(file_range.start, min(file_range.stop, file.num_row_groups)):
            group, found = file.metadata.row_group(number), 0
            rows = _rows_per_batch(group, wanted, limit)
            # Threads would each keep freed memory, and the cores belong to the tokenizers.
            for batch in file.iter_batches(rows, [number], wanted, use_threads=False):
                found += batch.num_rows
                yield from map(ArrowRows, bounded(batch, rows=limit.rows, size=limit.bytes))
            if found != group.num_rows:  # Arrow says nothing of rows that a damaged page lacks
                raise BadDataError(
                    f"row group {number:,} holds {found:,} rows, and its footer {group.num_rows:,}"
                )


def _rows_per_batch(group: pq.RowGroupMetaData, wanted: Collection[str], limit: Limit) -> int:
    bytes_per_row = max(1, _bytes_of(group, wanted) // max(1, group.num_rows))
    rows: int = limit.bytes // bytes_per_row
    return max(1, min(limit.rows, rows))


def _bytes_of(group: pq.RowGroupMetaData, wanted: Collection[str]) -> int:
    """The uncompressed size of these columns."""
    chunks = map(group.column, range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema.split(".", 1)[0] in wanted
    )


def arrow_columns(path: Path) -> tuple[str, ...]:
    """The column names of an Arrow IPC file or stream."""
    return filled_columns(path) if batch_sizes(path) else ()


def arrow_ranges(path: Path, columns: Collection[str], most: int) -> list[FileRange]:
    """The ranges of an Arrow IPC file or stream, cut between record batches."""
    return _joined(batch_sizes(path), most)


def arrow_payloads(
    path: Path, columns: Collection[str], limit: Limit, file_range: FileRange
) -> Iterator[ArrowRows]:
    """Yields the rows of an Arrow IPC file or stream."""
    # Mapped, not read: one record batch may be as large as the file.
    with pa.memory_map(str(path)) as source:
        for batch in open_batches(source, columns, file_range.start, file_range.stop):
            yield from map(ArrowRows, bounded(batch, rows=limit.rows, size=limit.bytes))


def csv_columns(path: Path) -> tuple[str, ...]:
    """The header of a CSV file."""
    rows = csv_rows(path)
    header = next(rows, [])
    return tuple(header) if next(rows, None) else ()


def csv_payloads(
    path: Path, columns: Collection[str], limit: Limit, file_range: FileRange
) -> Iterator[CsvRows]:
    """Yields the rows of a CSV file, all columns of them, so that cells can be counted."""
    rows = csv_rows(path)
    header = tuple(next(rows))
    for group in _groups(rows, lambda row: sum(map(len, row)), limit):
        yield CsvRows(header, group)


def json_columns(path: Path) -> tuple[str, ...]:
    """The keys of the first rows of a JSON file, in the order of their appearance."""
    names: dict[str, None] = {}
    count = 0
    for text in islice(json_rows(path), SAMPLED_JSON_ROWS):
        count += 1
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
) -> Iterator[JsonRows]:
    """Yields the rows of a JSON file; they are parsed where they are checked."""
    rows = json_rows(path, start=file_range.start, stop=file_range.stop)
    yield from map(JsonRows, _groups(rows, len, limit))


def _groups(
    items: Iterable[Item], size_of: Callable[[Item], int], limit: Limit
) -> Iterator[list[Item]]:
    group, size = list[Item](), 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if len(group) == limit.rows or size >= limit.bytes:
            yield group
            group, size = [], 0
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
