"""Conversions between Arrow columns and numpy arrays that share their memory.

Arrow's own conversions import pandas where it is installed, which costs 30 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True)
class Ragged:
    """`values[offsets[i]:offsets[i + 1]]` is list i."""

    values: NDArray[Any]  # (total,)
    offsets: NDArray[np.int64]  # (lists + 1,), offsets[0] == 0

    @staticmethod
    def of(lists: Sequence[Any], dtype: Any) -> Ragged:
        """Packs Python lists or arrays."""
        lengths = np.fromiter((len(item) for item in lists), dtype=np.int64, count=len(lists))
        filled = [np.asarray(item, dtype=dtype) for item in lists if len(item)]
        values = np.concatenate(filled) if filled else np.empty(0, dtype=dtype)
        return Ragged(values, offsets_of(lengths))

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """The lists of all parts, in order."""
        lengths = np.concatenate([part.lengths for part in parts])
        return Ragged(np.concatenate([part.values for part in parts]), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each list."""
        return np.diff(self.offsets)

    def take(self, indices: NDArray[np.int64]) -> Ragged:
        """The lists at `indices`, in that order."""
        return unpacked(packed(self).take(arrow_of(indices, pa.int64())), self.values.dtype)

    def head(self, limits: NDArray[np.int64]) -> Ragged:
        """Each list cut to at most `limits[i]` leading values."""
        lengths = np.minimum(self.lengths, limits)
        if (lengths == self.lengths).all():
            return self
        kept = joined_ranges(self.offsets[:-1], lengths)
        return Ragged(self.values[kept], offsets_of(lengths))


def offsets_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Running totals with a leading zero."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def joined_ranges(starts: NDArray[np.int64], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """The ranges `starts[i]` to `starts[i] + lengths[i]`, concatenated."""
    offsets = offsets_of(lengths)
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1], dtype=np.int64)


_NUMBERS = ("int8", "int16", "int32", "int64", "uint64", "float32", "float64")
DTYPES = {pa.from_numpy_dtype(name): np.dtype(name) for name in _NUMBERS}
DTYPES[pa.binary(16)] = np.dtype("S16")


def numpy_of(values: pa.Array) -> NDArray[Any]:
    """An array's numbers, without a copy; if any is null, a copy with NaN there."""
    content, dtype = values.buffers()[1], DTYPES[values.type]
    if content is None:
        return np.empty(0, dtype)
    array: NDArray[Any] = np.frombuffer(content, dtype)[values.offset :][: len(values)]
    return np.where(is_valid(values), array, np.nan) if values.null_count else array


def is_valid(values: pa.Array) -> NDArray[np.bool_]:
    """Mask of the values that are not null."""
    validity = values.buffers()[0]
    if validity is None:
        return np.ones(len(values), np.bool_)
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    return bits[values.offset :][: len(values)].astype(np.bool_)


def arrow_of(
    values: NDArray[Any], kind: pa.DataType, valid: NDArray[np.bool_] | None = None
) -> pa.Array:
    """An Arrow array of numbers, null where not `valid`; without a copy where possible."""
    plain = np.ascontiguousarray(values, dtype=DTYPES[kind])
    return pa.Array.from_buffers(kind, len(plain), [_bits(valid), pa.py_buffer(plain)])


def _bits(valid: NDArray[np.bool_] | None) -> pa.Buffer | None:
    if valid is None or valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def text_of(lines: Sequence[str]) -> pa.Array:
    """A column of text."""
    encoded = [line.encode() for line in lines]
    ends = offsets_of(np.fromiter(map(len, encoded), np.int64, len(encoded))).astype(np.int32)
    buffers = pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))
    return pa.StringArray.from_buffers(len(encoded), *buffers)


def bytes_of_texts(texts: pa.Array) -> bytes:
    """The bytes of all texts of a column, end to end."""
    _, ends, content = texts.buffers()
    if content is None:
        return b""
    found = np.frombuffer(ends, np.int32)[texts.offset :][: len(texts) + 1]
    whole: bytes = content[int(found[0]) : int(found[-1])].to_pybytes()
    return whole


def packed(lists: Ragged, valid: NDArray[np.bool_] | None = None) -> pa.Array:
    """Lists as byte strings over the same memory.

    Arrow copies each byte string at once, but lists of numbers value by value.
    """
    ends = pa.py_buffer(lists.offsets * lists.values.itemsize)
    content = pa.py_buffer(np.ascontiguousarray(lists.values))
    return pa.Array.from_buffers(pa.large_binary(), len(lists), [_bits(valid), ends, content])


def unpacked(lists: pa.Array, dtype: Any) -> Ragged:
    """The lists of numbers in byte strings, over the same memory; null becomes an empty list."""
    _, ends, content = lists.buffers()
    offsets = np.frombuffer(ends, np.int64)[lists.offset :][: len(lists) + 1]
    offsets = offsets // np.dtype(dtype).itemsize
    values = np.frombuffer(content or b"", dtype)[offsets[0] : offsets[-1]]
    return Ragged(values, offsets - offsets[0])


def ragged_of(lists: pa.Array) -> Ragged:
    """Lists of numbers; for a slice, only the slice's lists."""
    return Ragged(numpy_of(flattened(lists)), list_offsets(lists))


def flattened(lists: pa.Array) -> pa.Array:
    """The values of lists, end to end; for a slice, only the slice's values."""
    if not len(lists):
        return lists.values.slice(0, 0)
    offsets = numpy_of(lists.offsets)
    return lists.values.slice(offsets[0], offsets[-1] - offsets[0])


def list_offsets(lists: pa.Array) -> NDArray[np.int64]:
    """The start of each list among the values of `flattened`, and the end."""
    return offsets_of(np.diff(numpy_of(lists.offsets)))


def lists_over(offsets: NDArray[np.int64], inner: pa.Array, kind: pa.DataType) -> pa.Array:
    """Lists from their offsets and their joined values."""
    assert offsets[-1] == len(inner) < 2**31, (offsets[-1], len(inner))
    return pa.ListArray.from_arrays(arrow_of(offsets, pa.int32()), inner, type=kind)


def arrow_column(table: pa.Table, name: str) -> pa.Array:
    """One column as one array."""
    column = table.column(name).combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def list_column(table: pa.Table, name: str) -> Ragged:
    """The lists of one column; the table may be a slice of another."""
    return ragged_of(arrow_column(table, name))


def number_column(table: pa.Table, name: str) -> NDArray[Any]:
    """The values of one column; the table may be a slice of another."""
    return numpy_of(arrow_column(table, name))
