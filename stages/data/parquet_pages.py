"""The pages of a Parquet column by their headers: what they hold, before it is decoded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import pyarrow as pa

from ...schemas.errors import BadDataError
from .large_rows import MOST_DECODED
from .parquet_footer import ColumnChunk
from .thrift import ALL, DAMAGED, read_struct

_HEADER_BYTES = 1 << 14  # read at once; one with long statistics is read again, whole
_TYPE, _SIZE, _PACKED_SIZE = 1, 2, 3
# The structs of a data page, a dictionary and a data page of version 2, and where they say how
# their values are written.
_ENCODING = {5: 2, 7: 2, 8: 4}
_DELTA_BYTE_ARRAY = 7  # of which each value begins as the one before
_DICTIONARY = 2  # a type of pages
_HEADER = {_TYPE: ALL, _SIZE: ALL, _PACKED_SIZE: ALL} | {
    key: {1: ALL, name: ALL} for key, name in _ENCODING.items()
}
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


def pages_of(file: BinaryIO, chunk: ColumnChunk) -> Iterator[Page]:
    """The pages of one column in one row group."""
    at, number = chunk.start, file.fileno()
    end = at + chunk.packed_size
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
        fields, end = read_struct(content, 0, _HEADER)
    except DAMAGED:
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


def rows_at_once(
    file: BinaryIO, chunk: ColumnChunk, rows: int, wanted: float
) -> tuple[float, Page]:
    """The rows of a column that may be decoded at once, and its largest page.

    They are the fewest that the pages may need; where that is far below what is `wanted`, the
    values of a dictionary are looked at, too.
    """
    largest, most = Page(False, False, 0, 0, 0, 0), float(rows)
    values_per_row = max(1.0, chunk.values / max(1, rows))
    for page in pages_of(file, chunk):
        if page.size > largest.size:
            largest = page
        value: float = page.size
        if page.is_dictionary and chunk.is_text:
            value = max(1, page.size - 4 * page.values)  # if all others are empty
            if wanted * value * values_per_row > _AT_ONCE * _MOST_BATCHES:
                value = _longest_value(file, chunk, page)
        elif not page.is_delta:
            value = page.size / max(1, page.values)
        most = min(most, _AT_ONCE / max(1.0, value * values_per_row))
    return most, largest


_MOST_BATCHES = 16  # that are joined rather than to look at the values of a dictionary


def _longest_value(file: BinaryIO, chunk: ColumnChunk, page: Page) -> int:
    """The length of the longest text in a dictionary, or more."""
    texts = _texts_of(file, chunk, page)
    return page.size if texts is None else max(map(len, texts), default=1)


def repeats_a_text(file: BinaryIO, chunk: ColumnChunk) -> bool:
    """Whether a dictionary holds a text twice: Arrow then gives rows the texts of others."""
    first = next(pages_of(file, chunk), None)
    if first is None or not first.is_dictionary:
        return False
    texts = [*(_texts_of(file, chunk, first) or ())]
    return len({*texts}) < len(texts)


def _texts_of(file: BinaryIO, chunk: ColumnChunk, page: Page) -> Iterator[memoryview] | None:
    """The texts in a dictionary, uncopied; None if they are too many or not decompressed."""
    if page.size > MOST_DECODED or page.values > page.size // 4 or not chunk.is_text:
        return None
    content = os.pread(file.fileno(), page.packed_size, page.at)
    try:
        if chunk.codec != "UNCOMPRESSED":
            codec = pa.Codec(chunk.codec.lower())
            content = codec.decompress(content, page.size, asbytes=True)
    except (pa.ArrowException, ValueError, OSError):  # the reader knows it, or will say so itself
        return None
    return islice(_texts_in(memoryview(content)), page.values)


def _texts_in(content: memoryview) -> Iterator[memoryview]:
    at = 0
    while at + 4 <= len(content):
        end = at + 4 + int.from_bytes(content[at : at + 4], "little")
        yield content[at + 4 : end]
        at = end
