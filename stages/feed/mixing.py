"""Random order without a random generator: numbers are sorted by their hashes.

Generators change between versions of numpy; these few integer operations cannot. Their map of 64
bits onto 64 bits is one to one, so no two numbers share a hash and every sort gives one order.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def key_of(*parts: str | int) -> int:
    """A 64-bit key that depends on all parts."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little")


def shuffled(numbers: NDArray[np.int64], key: int) -> NDArray[np.int64]:
    """The same distinct numbers in an order that only they and the key decide."""
    return numbers[np.argsort(_mixed(numbers, key))]


def _mixed(numbers: NDArray[np.int64], key: int) -> NDArray[np.uint64]:
    """The splitmix64 finalizer (https://doi.org/10.1145/2660193.2660195) of each number."""
    mixed = numbers.astype(np.uint64) * _GOLDEN + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))
