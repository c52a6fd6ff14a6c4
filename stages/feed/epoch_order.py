"""The order of an epoch's rows, computed by arithmetic, without an array of all rows.

Row groups are permuted and taken in windows, and rows are permuted inside a window. So a reader
keeps one window in memory. Finding the row at a position takes a search among the windows and a
sort of one window.

The hash uses integer operations, because numpy's generators change between versions. It permutes
the 64-bit numbers, so no two rows share a hash and every sort gives the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from ...schemas.columns import joined_ranges, offsets_of

ROW_GROUPS_PER_WINDOW = 16  # 8192 rows or 8 Mi tokens at most


@dataclass(frozen=True)
class Order:
    """Row numbers by position; rows are numbered in stored order."""

    group_offsets: NDArray[np.int64]  # (row groups + 1,) row numbers
    groups: NDArray[np.int64]  # the row groups that are not empty, in reading order
    window_offsets: NDArray[np.int64]  # (windows + 1,) positions
    key: int | None  # permutes the rows inside windows; None: stored order
    times: NDArray[np.int64] | None = None  # (rows,) draws of each row; None: one

    def __len__(self) -> int:
        return int(self.window_offsets[-1])

    @property
    def num_windows(self) -> int:
        """The number of windows."""
        return len(self.window_offsets) - 1

    def window_at(self, position: int) -> int:
        """The index of the window that contains a position."""
        return int(np.searchsorted(self.window_offsets, position, side="right")) - 1

    def groups_of(self, window: int) -> NDArray[np.int64]:
        """The row groups of a window."""
        return self.groups[window * ROW_GROUPS_PER_WINDOW : (window + 1) * ROW_GROUPS_PER_WINDOW]

    def window_rows(self, window: int) -> NDArray[np.int64]:
        """All row numbers of a window, in order."""
        groups = self.groups_of(window)
        rows = joined_ranges(self.group_offsets[groups], np.diff(self.group_offsets)[groups])
        if self.times is None:
            return rows if self.key is None else shuffled(rows, self.key)
        # Each draw gets a number of its own: equal numbers would keep a row's draws together.
        count = int(self.group_offsets[-1])
        nth = joined_ranges(np.zeros(len(rows), dtype=np.int64), self.times[rows])
        draws = np.repeat(rows, self.times[rows]) + count * nth
        return (draws if self.key is None else shuffled(draws, self.key)) % count

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """The row numbers at positions `start` to `stop`."""
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        first, last = self.window_at(start), self.window_at(stop - 1)
        rows = np.concatenate([self.window_rows(window) for window in range(first, last + 1)])
        skipped = int(self.window_offsets[first])
        return rows[start - skipped : stop - skipped]


def shuffled_order(
    group_offsets: NDArray[np.int64],
    *,
    seed: int,
    epoch: int,
    times: NDArray[np.int64] | None = None,
) -> Order:
    """The order of one epoch, which depends on the row groups, the draws and the seed only.

    `times` is the number of draws of each row; None: one.
    """
    key = key_of("order of rows", seed, epoch)
    drawn = group_offsets if times is None else offsets_of(times)[group_offsets]
    groups = shuffled(_filled(drawn), key_of("order of row groups", seed, epoch))
    return replace(_order(drawn, groups, key), group_offsets=group_offsets, times=times)


def stored_order(group_offsets: NDArray[np.int64]) -> Order:
    """The order in which rows are stored."""
    return _order(group_offsets, _filled(group_offsets), None)


def _filled(group_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.flatnonzero(np.diff(group_offsets)).astype(np.int64)


def _order(group_offsets: NDArray[np.int64], groups: NDArray[np.int64], key: int | None) -> Order:
    ends = offsets_of(np.diff(group_offsets)[groups])
    window_offsets = np.append(ends[:-1:ROW_GROUPS_PER_WINDOW], ends[-1])
    return Order(group_offsets, groups, window_offsets, key)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def key_of(*parts: str | int) -> int:
    """A 64-bit hash of all parts."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little")


def shuffled(numbers: NDArray[np.int64], key: int) -> NDArray[np.int64]:
    """The numbers in an order that depends only on them and the key."""
    return numbers[np.argsort(mixed(numbers, key))]


def mixed(numbers: NDArray[np.int64] | NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The splitmix64 finalizer (https://doi.org/10.1145/2660193.2660195) of each number."""
    mixed = numbers.astype(np.uint64) * _GOLDEN + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))
