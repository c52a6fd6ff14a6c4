"""Flat files of numbers with a checksum of every block.

Beside `x.bin` lies `x.sums`: the length of the file in bytes, a checksum of that, and the CRC-32 of
each block. Rows wait here for hours while they are scored, and are read in any order.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ...schemas.errors import CorruptionError, os_errors_as_storage_errors

BLOCK_BYTES = 16 * 1024  # a multiple of every number's size
SUM = np.dtype("<u4")
_LENGTH = struct.Struct("<QI")


class SummedWriter:
    """Appends to a new file; use as a context manager, which makes it durable at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._sums = _Sums()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._file:
            if error[0] is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._sums.write(self._path)

    def write(self, numbers: NDArray[Any]) -> None:
        """Adds numbers after those already there."""
        content = np.ascontiguousarray(numbers).view(np.uint8).data
        self._file.write(content)
        self._sums.add(content)


@dataclass(frozen=True)
class Summed:
    """Numbers that lie in a file with checksums."""

    path: Path
    kind: str

    def __len__(self) -> int:
        return self._bytes // self._item

    @property
    def is_there(self) -> bool:
        """Whether both files exist."""
        return self.path.exists() and _sums_of(self.path).exists()

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """The numbers from a first to a last place, each block of them checked."""
        total = self._bytes
        low, high = start * self._item, total if stop is None else stop * self._item
        if low == high:
            return np.empty(0, dtype=self.kind)
        first, last = low // BLOCK_BYTES, -(-high // BLOCK_BYTES)
        content = self._content(first * BLOCK_BYTES, min(last * BLOCK_BYTES, total))
        self._require_sums(first, last, content)
        wanted = content[low - first * BLOCK_BYTES : high - first * BLOCK_BYTES]
        # A slice would keep whole blocks in memory, for each column of each run that is merged.
        return (wanted if len(wanted) == len(content) else wanted.copy()).view(self.kind)

    def at(self, places: NDArray[np.int64]) -> NDArray[Any]:
        """The numbers at `places`, wherever they lie, reading neighbours together."""
        size = BLOCK_BYTES // self._item
        blocks, back = np.unique(places // size, return_inverse=True)
        breaks = np.flatnonzero(np.diff(blocks) > 1) + 1
        groups = np.split(blocks, breaks) if len(blocks) else []
        spans = [(int(group[0]) * size, int(group[-1] + 1) * size) for group in groups]
        parts = [self.read(start, min(stop, len(self))) for start, stop in spans]
        # Only the last block of a file may be short, so block n of those read begins at n sizes.
        joined = np.concatenate([np.empty(0, dtype=self.kind), *parts])
        found: NDArray[Any] = joined[back * size + places % size]
        return found

    def search(
        self, value: Any, side: Literal["left", "right"], *, start: int = 0, stop: int | None = None
    ) -> int:
        """The position of a value among ascending numbers, as np.searchsorted."""
        low, high = start, len(self) if stop is None else stop
        while high - low > BLOCK_BYTES // self._item:
            middle = (low + high) // 2
            (number,) = self.read(middle, middle + 1)
            if number < value or (side == "right" and number == value):
                low = middle + 1
            else:
                high = middle
        return low + int(np.searchsorted(self.read(low, high), value, side=side))

    def check(self) -> None:
        """Reads the whole file."""
        step = 4 * BLOCK_BYTES // self._item
        for start in range(0, len(self), step):
            self.read(start, min(start + step, len(self)))

    @property
    def _item(self) -> int:
        return np.dtype(self.kind).itemsize

    @property
    def _bytes(self) -> int:
        head = self._from_file(_sums_of(self.path), 0, _LENGTH.size).tobytes()
        if len(head) == _LENGTH.size:
            length, checksum = _LENGTH.unpack(head)
            if crc32(head[:8]) == checksum:
                return int(length)
        raise self._damaged("its length is not known any more")

    def _content(self, start: int, stop: int) -> NDArray[np.uint8]:
        content = self._from_file(self.path, start, stop - start)
        if len(content) < stop - start:
            raise self._damaged(f"it ends after {start + len(content):,} bytes")
        return content

    def _require_sums(self, first: int, last: int, content: NDArray[np.uint8]) -> None:
        place = _LENGTH.size + SUM.itemsize * first
        sums = self._from_file(_sums_of(self.path), place, SUM.itemsize * (last - first))
        view = content.data
        found = [crc32(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]
        if sums.tobytes() != np.array(found, dtype=SUM).tobytes():
            raise self._damaged("it is not what was written (a checksum differs)")

    def _from_file(self, path: Path, start: int, count: int) -> NDArray[np.uint8]:
        with os_errors_as_storage_errors("read", path):
            try:
                return np.fromfile(path, dtype=np.uint8, count=count, offset=start)
            except FileNotFoundError:
                raise self._damaged("it is not there, or its checksums are not") from None

    def _damaged(self, why: str) -> CorruptionError:
        return CorruptionError(
            f"{self.path} is damaged: {why}. Remove this file and run the same command again: "
            "rows are prepared once more, and no finished shard is lost."
        )


def write_sums(path: Path) -> None:
    """Adds the checksums of a file that was written in another way."""
    sums = _Sums()
    with path.open("rb") as file:
        while block := file.read(4 * BLOCK_BYTES):
            sums.add(memoryview(block))
    sums.write(path)


class _Sums:
    """The checksums of what has been added so far."""

    def __init__(self) -> None:
        self._whole = array("I")
        self._open = 0  # the checksum of a block that is not full
        self._held = 0  # bytes in it

    def add(self, content: memoryview) -> None:
        place = 0
        while place < len(content):
            piece = content[place : place + BLOCK_BYTES - self._held]
            self._open, self._held = crc32(piece, self._open), self._held + len(piece)
            place += len(piece)
            if self._held == BLOCK_BYTES:
                self._whole.append(self._open)
                self._open = self._held = 0

    def write(self, path: Path) -> None:
        length = struct.pack("<Q", len(self._whole) * BLOCK_BYTES + self._held)
        sums = [*self._whole, self._open] if self._held else self._whole
        content = length + struct.pack("<I", crc32(length)) + np.array(sums, SUM).tobytes()
        with _sums_of(path).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _sums_of(path: Path) -> Path:
    return path.with_suffix(".sums")


class NumberFile:
    """Numbers on disk, indexed like an array; use as a context manager.

    Reading goes through a map of the file, whose pages `forget` gives back. Writing goes through
    ordinary writes: a disk that fills up under a map is a signal, not an error that can be caught.
    For the same reason no number of a new file is to be read before it has been written.
    """

    def __init__(self, path: Path, kind: str, *, length: int | None = None) -> None:
        """Opens a file that is there; with a `length`, makes it again."""
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
        """Makes what was written durable and checks what was read."""
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
        """Frees the pages read so far; they are read again when needed."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
