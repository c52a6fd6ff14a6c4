"""A flat file of numbers that is read in place, so that its length costs no memory."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from .summed import Summed, write_sums

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


class NumberFile:
    """Numbers on disk, indexed like an array; use as a context manager.

    Reading goes through a map of the file, whose pages `forget` gives back. Writing goes through
    ordinary writes: a disk that fills up under a map is a signal, not an error one can be told of.
    For the same reason no number of a new file is to be read before it has been written.
    """

    def __init__(self, path: Path, kind: str, *, length: int | None = None) -> None:
        """Opens a file that is there; with a `length`, makes it anew."""
        if length is None:
            Summed(path, kind).check()
        flags = os.O_RDONLY if length is None else os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._path = path
        self._kind = np.dtype(kind)
        self._is_new = length is not None
        self._file = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            if length is not None:
                os.ftruncate(self._file, length * self._kind.itemsize)
            size = os.fstat(self._file).st_size
            self._map = mmap.mmap(self._file, size, access=mmap.ACCESS_READ) if size else None
        except BaseException:
            os.close(self._file)
            raise
        self._numbers: NDArray[Any] = np.frombuffer(self._map or b"", dtype=self._kind)

    def __enter__(self) -> NumberFile:
        return self

    def __exit__(self, *error: object) -> None:
        """Makes what was written durable and checks what was read; the map goes with its slices."""
        try:
            if self._is_new and error[0] is None:
                os.fsync(self._file)
        finally:
            os.close(self._file)
            self._map, self._numbers = None, self._numbers[:0].copy()
        if error[0] is None and self._is_new:
            write_sums(self._path)
        elif error[0] is None:  # a map does not check its blocks as they are read
            Summed(self._path, self._kind.str).check()

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._numbers[index]

    def __setitem__(self, index: slice | int, values: Any) -> None:
        """Replaces one number, or those from a first to a last place."""
        first, stop = (index.start, index.stop) if isinstance(index, slice) else (index, index + 1)
        plain = np.atleast_1d(np.asarray(values, dtype=self._kind))
        assert 0 <= first <= stop <= len(self), (index, len(self))
        assert plain.shape == (stop - first,), (index, plain.shape)
        rest = np.ascontiguousarray(plain).view(np.uint8).data
        place = int(first) * self._kind.itemsize
        while rest:
            written = os.pwrite(self._file, rest, place)
            rest, place = rest[written:], place + written

    def forget(self) -> None:
        """Lets go of the pages read so far; they are read again when they are needed."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
