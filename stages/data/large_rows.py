"""Rows that are too large to be read, and how much each row of a batch holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

MIB = 1 << 20
MOST_ROW_BYTES = 16 * MIB  # what `data.max_cell_mib` says where nobody says more
# What is decoded at once beside the rows that are wanted; more only where rows are many.
MOST_DECODED = 512 * MIB
# A value in a list costs a Python object, however short it is.
_PER_VALUE = 16


@dataclass(frozen=True)
class LongRow:
    """A row that holds more bytes than are read, in place of its text."""

    bytes: int


@dataclass(frozen=True)
class LongRows:
    """Consecutive rows that are not read, because each holds too much or cannot be told apart."""

    reasons: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.reasons)


def too_large(size: float, most: int) -> str:
    """Why a row is not read."""
    return f"the row holds {size / MIB:,.1f} MiB, more than data.max_cell_mib={most / MIB:g} allows"


def is_undecodable(size: int, values: int, most: int) -> bool:
    """Whether decoding a part of a file would fill the memory for a few large values."""
    return size > MOST_DECODED and size > values * most / 16


def is_light(batch: pa.RecordBatch, most: int) -> bool:
    """Whether all rows together hold no more, as far as that shows without looking at each."""
    counted = max((_counted(field.type) for field in batch.schema), default=1.0)
    return bool(batch.nbytes * counted <= most)


def _counted(kind: pa.DataType) -> float:
    """How often `row_sizes` may count a byte of a column; endlessly where values are shared."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        least = _least(kind.value_type)
        return max(1 + _PER_VALUE / least, _counted(kind.value_type)) if least else math.inf
    if pa.types.is_struct(kind):
        return max((_counted(field.type) for field in kind), default=math.inf)
    return 1.0 if _least(kind) else math.inf


def _least(kind: pa.DataType) -> int:
    """The bytes that a value takes at least; 0 if it may be none."""
    if pa.types.is_struct(kind):
        return max((_least(field.type) for field in kind), default=0)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return int(kind.bit_width) // 8
    return 4 if any(is_kind(kind) for is_kind in _WITH_OFFSETS) else 0


_WITH_OFFSETS = (
    *(pa.types.is_string, pa.types.is_binary, pa.types.is_list),
    *(pa.types.is_large_string, pa.types.is_large_binary, pa.types.is_large_list),
)


def row_sizes(batch: pa.RecordBatch) -> NDArray[np.float64]:
    """The bytes of each row once dictionaries, views and runs are replaced by their values."""
    return sum(map(_sizes, batch.columns), np.zeros(batch.num_rows))


def _sizes(column: pa.Array) -> NDArray[np.float64]:
    """The bytes of each value; floats, as what lists of lists refer to has no bound."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _sizes(column.storage)
    if pa.types.is_dictionary(kind):
        return _picked(_sizes(column.dictionary), column.indices)
    if pa.types.is_run_end_encoded(kind):
        ends = np.asarray(column.run_ends) - column.offset
        return _sizes(column.values)[np.searchsorted(ends, np.arange(len(column)), side="right")]
    if pa.types.is_struct(kind):
        fields = (column.field(index) for index in range(kind.num_fields))
        return sum(map(_sizes, fields), np.zeros(len(column)))
    if pa.types.is_union(kind):
        return np.full(len(column), column.nbytes / max(1, len(column)))
    if pa.types.is_nested(kind):
        return _list_sizes(column)
    return _text_sizes(column)


def _picked(sizes: NDArray[np.float64], indices: pa.Array) -> NDArray[np.float64]:
    if not len(sizes):
        return np.zeros(len(indices))
    places = np.asarray(indices.fill_null(0) if indices.null_count else indices)
    picked: NDArray[np.float64] = sizes[places]
    return picked


def _list_sizes(column: pa.Array) -> NDArray[np.float64]:
    kind, count = column.type, len(column)
    if pa.types.is_fixed_size_list(kind):
        values, sizes = column.values, np.full(count, kind.list_size)
        starts = (np.arange(count) + column.offset) * kind.list_size
    else:
        is_view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
        wide = pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind)
        offsets = _numbers(column, 1, wide, count if is_view else count + 1)
        starts = offsets[:count].astype(np.int64)
        sizes = _numbers(column, 2, wide, count) if is_view else np.diff(offsets)
        values = _map_values(column) if pa.types.is_map(kind) else column.values
    held = np.append(0.0, np.cumsum(_sizes(values) + _PER_VALUE))
    # Lists that are null may point anywhere.
    starts, ends = (np.clip(at, 0, len(values)) for at in (starts, starts + sizes))
    return np.asarray(held[ends] - held[starts], dtype=np.float64)


def _map_values(column: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])


def _text_sizes(column: pa.Array) -> NDArray[np.float64]:
    kind, count = column.type, len(column)
    wide = kind in (pa.large_string(), pa.large_binary())
    if wide or kind in (pa.string(), pa.binary()):
        return np.diff(_numbers(column, 1, wide, count + 1)).astype(np.float64)
    if kind in (pa.string_view(), pa.binary_view()):
        if not count:
            return np.zeros(0)
        end = column.offset + count
        views = np.frombuffer(column.buffers()[1], dtype=np.int32, count=4 * end).reshape(-1, 4)
        return views[column.offset :, 0].astype(np.float64)
    return np.full(count, 0 if pa.types.is_null(kind) else max(1, kind.bit_width // 8), np.float64)


def _numbers(column: pa.Array, buffer: int, wide: bool, count: int) -> NDArray[np.int64]:
    held = column.buffers()[buffer]
    if held is None or not held.size:
        return np.zeros(count, dtype=np.int64)
    kind, end = "i8" if wide else "i4", column.offset + count
    numbers: NDArray[Any] = np.frombuffer(held, dtype=kind, count=end)
    return numbers[column.offset :]
