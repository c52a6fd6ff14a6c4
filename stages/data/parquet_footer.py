"""What the footer of a Parquet file says of its columns, read without Arrow.

Arrow ends the process when it is asked for a column whose sizes or keys are damaged.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...schemas.errors import BadDataError
from .thrift import ALL, DAMAGED, read_struct

_MAGIC = b"PAR1"
_CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW")
_BYTE_ARRAY = 6
# The ids of the fields: of the file, a row group, a column in it, and what is known of that.
_ROW_GROUPS, _COLUMNS, _ROWS, _META = 4, 1, 3, 3
_TYPE, _PATH, _CODEC, _VALUES, _SIZE, _PACKED_SIZE, _DATA, _DICTIONARY = 1, 3, 4, 5, 6, 7, 9, 11
_OF_CHUNK = dict.fromkeys(
    (_TYPE, _PATH, _CODEC, _VALUES, _SIZE, _PACKED_SIZE, _DATA, _DICTIONARY), ALL
)
_WANTED = {_ROW_GROUPS: {_COLUMNS: {_META: _OF_CHUNK}, _ROWS: ALL}}


@dataclass(frozen=True)
class ColumnChunk:
    """One column in one row group."""

    path: str  # the column, and the fields in it
    is_text: bool  # values of any length
    codec: str
    values: int
    size: int  # decompressed
    packed_size: int
    start: int  # of its first page

    @property
    def column(self) -> str:
        """The name of the column as a person knows it."""
        return self.path.split(".", 1)[0]


@dataclass(frozen=True)
class Group:
    """One row group."""

    rows: int
    chunks: tuple[ColumnChunk, ...]

    def of(self, columns: Collection[str]) -> list[ColumnChunk]:
        """The chunks of these columns."""
        return [chunk for chunk in self.chunks if chunk.column in columns]


def read_groups(path: Path) -> tuple[Group, ...]:
    """The row groups of a Parquet file."""
    status = path.stat()
    return _groups(path, status.st_size, status.st_mtime_ns)


@lru_cache(256)  # each is asked for its columns, its ranges and its rows
def _groups(path: Path, size: int, changed: int) -> tuple[Group, ...]:
    with path.open("rb") as file:
        file.seek(-min(size, 8), os.SEEK_END)
        end = file.read()
        length = int.from_bytes(end[:4], "little")
        if len(end) < 8 or end[4:] != _MAGIC or length > size - 8:
            raise BadDataError("its footer is missing or damaged")
        file.seek(size - 8 - length)
        content = file.read(length)
    try:
        footer, _ = read_struct(content, 0, _WANTED)
        return tuple(map(_group, footer.get(_ROW_GROUPS, [])))
    except (*DAMAGED, TypeError, AttributeError) as error:
        raise BadDataError("its footer is damaged") from error


def _group(fields: dict[int, Any]) -> Group:
    chunks = tuple(_chunk(one[_META]) for one in fields[_COLUMNS])
    return Group(_number(fields[_ROWS]), chunks)


def _chunk(fields: dict[int, Any]) -> ColumnChunk:
    numbers = [_number(fields[key]) for key in (_VALUES, _SIZE, _PACKED_SIZE, _DATA)]
    values, size, packed_size, start = numbers
    # Older writers say 0 where there is no dictionary.
    if 0 < _number(fields.get(_DICTIONARY, 0)) < start:
        start = fields[_DICTIONARY]
    path = ".".join(part.decode() for part in fields[_PATH])
    is_text, codec = fields[_TYPE] == _BYTE_ARRAY, _CODECS[_number(fields[_CODEC])]
    return ColumnChunk(path, is_text, codec, values, size, packed_size, start)


def _number(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError
    return value
