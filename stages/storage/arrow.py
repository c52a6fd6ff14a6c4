"""Numbers and text between numpy, Python and Arrow by their bytes.

Arrow's own conversions import pandas, where it is installed, and its functions come with eight
megabytes of wrappers: thirty megabytes for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DTYPES: dict[pa.DataType, np.dtype[Any]] = {
    pa.int8(): np.dtype(np.int8),
    pa.int32(): np.dtype(np.int32),
    pa.int64(): np.dtype(np.int64),
    pa.uint64(): np.dtype(np.uint64),
    pa.float32(): np.dtype(np.float32),
    pa.float64(): np.dtype(np.float64),
}


def arrow_of(values: NDArray[Any], kind: pa.DataType, *, nan_is_null: bool = False) -> pa.Array:
    """An array of numbers over the same memory where type and layout allow it."""
    plain = np.ascontiguousarray(values, dtype=DTYPES[kind])
    validity = None
    if nan_is_null and (missing := np.isnan(plain)).any():
        validity = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(kind, len(plain), [validity, pa.py_buffer(plain)])


def text_of(lines: Sequence[str]) -> pa.Array:
    """An array of strings."""
    encoded = [line.encode() for line in lines]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(line) for line in encoded], out=offsets[1:])
    buffers = pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))
    return pa.StringArray.from_buffers(len(encoded), *buffers)


def bytes_of(digests: NDArray[np.bytes_]) -> pa.Array:
    """An array of byte strings of one length over the same memory."""
    plain = np.ascontiguousarray(digests)
    kind = pa.binary(plain.itemsize)
    return pa.Array.from_buffers(kind, len(plain), [None, pa.py_buffer(plain.view(np.uint8))])


def digests_of(values: pa.Array) -> NDArray[np.bytes_]:
    """Byte strings of one length over their memory; none is null."""
    width = values.type.byte_width
    _, content = values.buffers()
    if content is None:
        return np.empty(0, dtype=f"S{width}")
    return np.frombuffer(content, f"S{width}")[values.offset :][: len(values)]


def flattened(lists: pa.Array) -> pa.Array:
    """What the lists hold, end to end; of a slice its own part only."""
    if not len(lists):
        return lists.values.slice(0, 0)
    offsets = numpy_of(lists.offsets)
    return lists.values.slice(offsets[0], offsets[-1] - offsets[0])


def numpy_of(values: pa.Array) -> NDArray[Any]:
    """The numbers of an array over its memory; NaN, in memory of its own, where one is null."""
    validity, numbers = values.buffers()
    dtype = DTYPES[values.type]
    if numbers is None:
        return np.empty(0, dtype)
    array: NDArray[Any] = np.frombuffer(numbers, dtype)[values.offset :][: len(values)]
    if not values.null_count:
        return array
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    filled = array.copy()
    filled[bits[values.offset :][: len(values)] == 0] = np.nan
    return filled
