"""Lists of different lengths, held as one flat array and its offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        """Joins several, in order."""
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
        """How long each list is."""
        return np.diff(self.offsets)

    def take(self, indices: NDArray[np.int64]) -> Ragged:
        """The lists at `indices`, in that order."""
        lengths = self.lengths[indices]
        offsets = offsets_of(lengths)
        within = np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], lengths)
        return Ragged(self.values[np.repeat(self.offsets[indices], lengths) + within], offsets)

    def slice(self, start: int, stop: int) -> Ragged:
        """Lists `start` to `stop`, without copying values."""
        first, last = self.offsets[start], self.offsets[stop]
        return Ragged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def head(self, limits: NDArray[np.int64]) -> Ragged:
        """Each list cut to at most `limits[i]` leading values."""
        lengths = np.minimum(self.lengths, limits)
        if (lengths == self.lengths).all():
            return self
        offsets = offsets_of(lengths)
        within = np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], lengths)
        return Ragged(self.values[np.repeat(self.offsets[:-1], lengths) + within], offsets)


def offsets_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Running totals with a leading zero."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
