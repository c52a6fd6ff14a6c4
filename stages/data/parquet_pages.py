"""The pages of a Parquet column by their headers, which tell what they hold before it is decoded.

A header is a Thrift struct in the compact protocol: https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import BadDataError
from .large_rows import MOST_DECODED

_HEADER_BYTES = 1 << 12  # read at once; one with long statistics is read again, whole
_TYPE, _SIZE, _PACKED_SIZE = 1, 2, 3
_COUNTED = (5, 7, 8)  # the structs of a data page, a dictionary and a data page of version 2
_DICTIONARY = 2  # a type of pages
_NESTED_AT_MOST = 8
_AT_ONCE = 128 << 20  # bytes that a batch may decode to


@dataclass(frozen=True)
class Page:
    """A page of a column."""

    is_dictionary: bool
    size: int  # decompressed
    packed_size: int
    values: int
    at: int  # in the file, behind its header


def pages_of(file: BinaryIO, chunk: pq.ColumnChunkMetaData) -> Iterator[Page]:
    """The pages of one column in one row group."""
    at = chunk.data_page_offset
    if chunk.dictionary_page_offset is not None and 0 < chunk.dictionary_page_offset < at:
        at = chunk.dictionary_page_offset
    end = at + chunk.total_compressed_size
    while at < end:
        file.seek(at)
        page = _page(file.read(_HEADER_BYTES), at) or _page(file.read(_HEADER_BYTES << 12), at)
        if page is None:
            raise BadDataError(f"its page at byte {at:,} has no valid header")
        yield page
        at = page.at + page.packed_size


def _page(content: bytes, at: int) -> Page | None:
    header = _Struct(content)
    try:
        fields = header.read()
    except (IndexError, ValueError):
        return None
    structs = (fields.get(key) for key in _COUNTED)
    counted: dict[int, Any] = next((one for one in structs if isinstance(one, dict)), {})
    numbers: list[Any] = [fields.get(key) for key in (_TYPE, _SIZE, _PACKED_SIZE)]
    numbers.append(counted.get(1, 0))
    if not all(isinstance(one, int) and one >= 0 for one in numbers):
        return None
    kind, size, packed, values = numbers
    return Page(kind == _DICTIONARY, size, packed, values, at + header.at)


class _Struct:
    """A struct in the compact protocol: its numbers and structs by the ids of their fields."""

    def __init__(self, content: bytes) -> None:
        self.at = 0
        self._content = content

    def read(self, depth: int = 0) -> dict[int, Any]:
        """Reads one struct, of whose fields only numbers and structs have values."""
        if depth > _NESTED_AT_MOST:
            raise ValueError
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2:  # the kind is the truth value
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._signed()
            case 7:
                return self._pass(8)
            case 8:
                return self._pass(self._unsigned())
            case 9 | 10:
                return self._list(depth)
            case 12:
                return self.read(depth + 1)
        raise ValueError

    def _list(self, depth: int) -> None:
        head = self._byte()
        count = self._unsigned() if head >> 4 == 15 else head >> 4
        for _ in range(min(count, len(self._content))):
            self._value(head & 15, depth + 1)

    def _pass(self, count: int) -> None:
        self.at += count
        if self.at > len(self._content):
            raise IndexError

    def _byte(self) -> int:
        self.at += 1
        return self._content[self.at - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128 or shift > 63:
                return value

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)


def rows_at_once(file: BinaryIO, chunk: pq.ColumnChunkMetaData, rows: int) -> tuple[float, Page]:
    """The rows of a column that may be decoded at once, and its largest page."""
    largest, most = Page(False, 0, 0, 0, 0), float(rows)
    values_per_row = max(1.0, chunk.num_values / max(1, rows))
    is_delta = "DELTA_BYTE_ARRAY" in chunk.encodings  # whose values begin as the one before
    for page in pages_of(file, chunk):
        largest = max(largest, page, key=lambda one: one.size)
        if page.is_dictionary:
            value = float(_longest_value(file, chunk, page))
        else:
            value = page.size if is_delta else page.size / max(1, page.values)
        most = min(most, _AT_ONCE / max(1.0, value * values_per_row))
    return most, largest


def _longest_value(file: BinaryIO, chunk: pq.ColumnChunkMetaData, page: Page) -> int:
    """The length of the longest text in a dictionary, or more."""
    least = page.size - 4 * (page.values - 1)
    if chunk.physical_type != "BYTE_ARRAY" or least * chunk.num_values < _AT_ONCE:
        return max(1, least)
    if page.size > MOST_DECODED or page.values > page.size // 4:
        return page.size
    file.seek(page.at)
    content = file.read(page.packed_size)
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
