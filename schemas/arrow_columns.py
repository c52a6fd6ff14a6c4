"""Arrow columns over the memory of numpy arrays and lists, and back, without copies.

Arrow's own conversions import pandas, where it is installed, and its functions come with eight
megabytes of wrappers: thirty megabytes for nothing.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .columns import Ragged, offsets_of

Values: TypeAlias = "NDArray[Any] | Ragged"


def list_column(table: pa.Table, name: str) -> Ragged:
    """The lists of one column; the table may be a slice of another."""
    return ragged_of(arrow_column(table, name))


def number_column(table: pa.Table, name: str) -> NDArray[Any]:
    """The values of one column; the table may be a slice of another."""
    return numpy_of(arrow_column(table, name))


def arrow_column(table: pa.Table, name: str) -> pa.Array:
    """One column as one array."""
    column = table.column(name).combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def ragged_of(lists: pa.Array) -> Ragged:
    """Lists of numbers; of a slice its own part only."""
    return Ragged(numpy_of(flattened(lists)), offsets_of(lengths_of(lists)))


def lengths_of(lists: pa.Array) -> NDArray[Any]:
    """The length of each list."""
    return np.diff(numpy_of(lists.offsets))


def flattened(lists: pa.Array) -> pa.Array:
    """The values of lists, end to end; of a slice its own part only."""
    if not len(lists):
        return lists.values.slice(0, 0)
    offsets = numpy_of(lists.offsets)
    return lists.values.slice(offsets[0], offsets[-1] - offsets[0])


_NUMBERS = ("int8", "int16", "int32", "int64", "uint64", "float32", "float64")
_DTYPES = {pa.from_numpy_dtype(name): np.dtype(name) for name in _NUMBERS}
_DTYPES[pa.binary(16)] = np.dtype("S16")


def numpy_of(values: pa.Array) -> NDArray[Any]:
    """The values of an array over its memory; NaN, in memory of its own, where one is null."""
    validity, content = values.buffers()
    dtype = _DTYPES[values.type]
    if content is None:
        return np.empty(0, dtype)
    array: NDArray[Any] = np.frombuffer(content, dtype)[values.offset :][: len(values)]
    if not values.null_count:
        return array
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    filled = array.copy()
    filled[bits[values.offset :][: len(values)] == 0] = np.nan
    return filled


def arrow_of(values: Values, kind: pa.DataType, *, nan_is_null: bool = False) -> pa.Array:
    """Values, or lists of them, over the same memory where type and layout allow it."""
    if isinstance(values, Ragged):
        return lists_over(values.offsets, arrow_of(values.values, kind.value_type), kind)
    plain = np.ascontiguousarray(values, dtype=_DTYPES[kind])
    validity = None
    if nan_is_null and (missing := np.isnan(plain)).any():
        validity = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(kind, len(plain), [validity, pa.py_buffer(plain)])


def number_type(kind: str) -> pa.DataType:
    """Arrow's type of numpy's numbers; digests are bytes of one length."""
    return pa.binary(16) if kind == "S16" else pa.from_numpy_dtype(np.dtype(kind))


def lists_over(offsets: NDArray[np.int64], inner: pa.Array, kind: pa.DataType) -> pa.Array:
    """Lists over what they hold, end to end."""
    assert offsets[-1] == len(inner) < 2**31, (offsets[-1], len(inner))
    return pa.ListArray.from_arrays(arrow_of(offsets, pa.int32()), inner, type=kind)
