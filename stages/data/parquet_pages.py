"""The pages of a Parquet column by their headers, which tell what they hold before it is decoded.

A header is a Thrift struct in the compact protocol: https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import BadDataError
from .large_rows import MOST_DECODED

_HEADER_BYTES = 1 << 14  # read at once; one with long statistics is read again, whole
_TYPE, _SIZE, _PACKED_SIZE = 1, 2, 3
# The structs of a data page, a dictionary and a data page of version 2, and where they say how
# their values are written.
_ENCODING = {5: 2, 7: 2, 8: 4}
_DELTA_BYTE_ARRAY = 7  # of which each value begins as the one before
_DICTIONARY = 2  # a type of pages
_NESTED_AT_MOST = 8
_AT_ONCE = 128 << 20  # bytes that a batch may decode to


@dataclass(frozen=True)
class Page:
    """A page of a column."""

    is_dictionary: bool
    is_delta: bool
    size: int  # decompressed
    packed_size: int
    values: int
    at: int  # in the file, behind its header


def pages_of(file: BinaryIO, chunk: pq.ColumnChunkMetaData) -> Iterator[Page]:
    """The pages of one column in one row group."""
    at, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < at:
        at = dictionary
    end, number = at + chunk.total_compressed_size, file.fileno()
    while at < end:
        page = _page(os.pread(number, _HEADER_BYTES, at), at) or _page(
            os.pread(number, _HEADER_BYTES << 10, at), at
        )
        if page is None:
            raise BadDataError(f"its page at byte {at:,} has no valid header")
        yield page
        at = page.at + page.packed_size


def _page(content: bytes, at: int) -> Page | None:
    try:
        fields, end = _struct(content, 0, 0)
    except (IndexError, ValueError):
        return None
    counted: dict[int, Any] = {}
    encoding = 0
    for key, name in _ENCODING.items():
        if isinstance(found := fields.get(key), dict):
            counted, encoding = found, found.get(name, 0)
            break
    numbers: list[Any] = [fields.get(key) for key in (_TYPE, _SIZE, _PACKED_SIZE)]
    numbers.append(counted.get(1, 0))
    if not all(isinstance(one, int) and one >= 0 for one in numbers):
        return None
    kind, size, packed, values = numbers
    is_delta = encoding == _DELTA_BYTE_ARRAY
    return Page(kind == _DICTIONARY, is_delta, size, packed, values, at + end)


def _struct(content: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """A struct in the compact protocol by the ids of its fields, and where it ends.

    Only numbers and structs have values.
    """
    if depth > _NESTED_AT_MOST:
        raise ValueError
    fields: dict[int, Any] = {}
    number = 0
    while head := content[at]:
        at += 1
        if step := head >> 4:
            number += step
        else:
            number, at = _signed(content, at)
        fields[number], at = _value(content, at, head & 15, depth)
    return fields, at + 1


def _value(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (4, 5, 6):
        return _signed(content, at)
    if kind in (1, 2):  # the kind is the truth value
        return kind == 1, at
    if kind == 12:
        return _struct(content, at, depth + 1)
    if kind == 8:
        length, at = _unsigned(content, at)
        return None, _within(content, at + length)
    if kind == 3:
        return content[at], at + 1
    if kind == 7:
        return None, _within(content, at + 8)
    if kind in (9, 10):
        return None, _list_end(content, at, depth)
    raise ValueError


def _list_end(content: bytes, at: int, depth: int) -> int:
    head = content[at]
    count, at = _unsigned(content, at + 1) if head >> 4 == 15 else (head >> 4, at + 1)
    for _ in range(min(count, len(content))):
        _, at = _value(content, at, head & 15, depth + 1)
    return at


def _within(content: bytes, at: int) -> int:
    if at > len(content):
        raise IndexError
    return at


def _unsigned(content: bytes, at: int) -> tuple[int, int]:
    byte = content[at]
    if byte < 128:
        return byte, at + 1
    value, shift = byte & 127, 7
    while True:
        at += 1
        byte = content[at]
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128 or shift > 63:
            return value, at + 1


def _signed(content: bytes, at: int) -> tuple[int, int]:
    value, at = _unsigned(content, at)
    return (value >> 1) ^ -(value & 1), at


def rows_at_once(
    file: BinaryIO, chunk: pq.ColumnChunkMetaData, rows: int, wanted: float
) -> tuple[float, Page]:
    """The rows of a column that may be decoded at once, and its largest page.

    They are the fewest that the pages may need; where that is far below what is `wanted`, the
    values of a dictionary are looked at, too.
    """
    largest, most = Page(False, False, 0, 0, 0, 0), float(rows)
    values_per_row = max(1.0, chunk.num_values / max(1, rows))
    for page in pages_of(file, chunk):
        if page.size > largest.size:
            largest = page
        value: float = page.size
        if page.is_dictionary and chunk.physical_type == "BYTE_ARRAY":
            value = max(1, page.size - 4 * page.values)  # if all others are empty
            if wanted * value * values_per_row > _AT_ONCE * _MOST_BATCHES:
                value = _longest_value(file, chunk, page)
        elif not page.is_delta:
            value = page.size / max(1, page.values)
        most = min(most, _AT_ONCE / max(1.0, value * values_per_row))
    return most, largest


_MOST_BATCHES = 16  # that are joined rather than to look at the values of a dictionary


def _longest_value(file: BinaryIO, chunk: pq.ColumnChunkMetaData, page: Page) -> int:
    """The length of the longest text in a dictionary, or more."""
    if page.size > MOST_DECODED or page.values > page.size // 4:
        return page.size
    content = os.pread(file.fileno(), page.packed_size, page.at)
    try:
        if chunk.compression != "UNCOMPRESSED":
            codec = pa.Codec(chunk.compression.lower())
            content = codec.decompress(content, page.size, asbytes=True)
    except (pa.ArrowException, ValueError, OSError):  # the reader knows it, or will say so itself
        return page.size
    return max(islice(_lengths(content), page.values), default=1)


def _lengths(content: bytes) -> Iterator[int]:
    at = 0
    while at + 4 <= len(content):
        length = int.from_bytes(content[at : at + 4], "little")
        yield length
        at += 4 + length
