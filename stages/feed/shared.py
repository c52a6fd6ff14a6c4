"""Prompts that are learned from and measured by at once, or nearly so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..storage.shard_columns import number_column
from ..storage.shards import iter_row_groups
from .held_out import held_out
from .index import naming_unit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .source import TrainSource

NEAR = 6  # of the eight bytes of two sketches are equal
# Three groups of these bytes: where two bytes differ at most, one group at least is equal.
_BANDS = ((0, 24), (24, 24), (48, 16))  # first bit and bits
MOST_COMPARED = 256  # sketches with one group in common that a prompt is compared with
_COLUMNS = ("split_key", "prompt_sketch")


@dataclass(frozen=True)
class Overlap:
    """What the prompts that are measured by have in common with those that are learned from."""

    held_out: int  # different prompts that are measured by
    shared: int  # of them: learned from as well
    near: int  # of the others: nearly the same as one that is learned from


def overlap(source: TrainSource, held_out_source: TrainSource) -> Overlap:
    """Compares prompts by their split keys, and by their sketches (see `count_near`).

    Rows that the method leaves out are counted too.
    """
    learned = _prompts(source, is_held_out=False)
    measured = _prompts(held_out_source, is_held_out=True).different()
    is_shared = np.isin(measured.keys, learned.keys)
    near = count_near(measured.sketches[~is_shared], learned.sketches)
    return Overlap(len(measured.keys), int(is_shared.sum()), near)


def count_near(sketches: NDArray[np.uint64], others: NDArray[np.uint64]) -> int:
    """How many of the first have a near-duplicate among the others: six of eight bytes are equal.

    A byte is equal with the probability that a pair of neighbouring words which one prompt has is
    in both. So of prompts that share nine of ten such pairs about 96 in 100 are found, of those
    that share two of three 47, of those that share one of three 2, of unrelated ones none. A prompt
    is compared with `MOST_COMPARED` others of a band at most, so the number is a lower bound.
    """
    others = np.unique(others)
    left = sketches[~np.isin(sketches, others)]
    found = len(sketches) - len(left)
    for first_bit, bits in _BANDS:
        is_near = _near_in_band(left, others, first_bit, bits)
        found, left = found + int(is_near.sum()), left[~is_near]
    return found


def _near_in_band(
    sketches: NDArray[np.uint64], others: NDArray[np.uint64], first_bit: int, bits: int
) -> NDArray[np.bool_]:
    """Which are near to one of the others with which they share this group of bits."""
    mask = np.uint64((1 << bits) - 1)
    bands = (others >> np.uint64(first_bit)) & mask
    order = np.argsort(bands, kind="stable")
    bands, others = bands[order], others[order]
    wanted = (sketches >> np.uint64(first_bit)) & mask
    place = np.searchsorted(bands, wanted, side="left")
    stop = np.minimum(np.searchsorted(bands, wanted, side="right"), place + MOST_COMPARED)
    is_near = np.zeros(len(sketches), dtype=np.bool_)
    left = np.flatnonzero(place < stop)
    while len(left):
        here = _equal_bytes(sketches[left], others[place[left]]) >= NEAR
        is_near[left[here]] = True
        place[left] += 1
        left = left[~here]
        left = left[place[left] < stop[left]]
    return is_near


def _equal_bytes(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.int64]:
    differing = (first ^ second).view(np.uint8).reshape(-1, 8)
    return np.asarray((differing == 0).sum(axis=1))


@dataclass(frozen=True)
class _Prompts:
    """A key and a sketch of each prompt."""

    keys: NDArray[np.uint64]
    sketches: NDArray[np.uint64]

    def different(self) -> _Prompts:
        """Each prompt once."""
        keys, firsts = np.unique(self.keys, return_index=True)
        return _Prompts(keys, self.sketches[firsts])


def _prompts(source: TrainSource, *, is_held_out: bool) -> _Prompts:
    """The prompts of all rows on one side of the split; 16 bytes a row."""
    keys, sketches = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for shard in source.manifest.shards:
        with naming_unit(shard.unit):
            for group in iter_row_groups(source.folder.data / shard.file, _COLUMNS):
                found, sketched = (number_column(group, name) for name in _COLUMNS)
                here = held_out(found, source.reading.eval_fraction) == is_held_out
                keys.append(found[here])
                sketches.append(sketched[here])
    return _Prompts(np.concatenate(keys), np.concatenate(sketches))
