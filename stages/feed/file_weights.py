"""Weights of data files: the number of draws of each file's rows in an epoch.

An epoch draws a file's number of rows times its weight, rounded. Every row is drawn equally often,
and the remaining draws continue through one order of the file's rows from epoch to epoch. So at a
weight of 0.5, two epochs draw every row once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import InputEntry
from ...schemas.errors import UsageError
from .epoch_order import key_of, shuffled

SETTING = "train.file_weights"
HEAVIEST = 1000.0


@dataclass(frozen=True)
class Draws:
    """The draws of an epoch from the training rows of each file."""

    file_of: NDArray[np.int16]  # (rows,) index of each row's file
    per_epoch: tuple[int, ...]  # of each file

    @staticmethod
    def of(file_of: NDArray[np.int16], weights: Sequence[float]) -> Draws:
        """The draws for these weights; half a draw is rounded up."""
        counts = np.bincount(file_of, minlength=len(weights)).tolist()
        # Computed in decimals: in binary fractions, 0.1 times 5 is more than a half.
        exact = [Fraction(repr(weight)) * n for weight, n in zip(weights, counts, strict=True)]
        return Draws(file_of, tuple(math.floor(draws + Fraction(1, 2)) for draws in exact))

    def __len__(self) -> int:
        return sum(self.per_epoch)

    def times(self, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """The number of draws of each row in an epoch, (rows,)."""
        times = np.zeros(len(self.file_of), dtype=np.int64)
        for file, draws in enumerate(self.per_epoch):
            rows = np.flatnonzero(self.file_of == file)
            if not len(rows):
                continue
            turns, more = divmod(draws, len(rows))
            order = shuffled(rows, key_of("rows of a file", seed))
            times[rows] = turns
            times[np.roll(order, -(epoch * more % len(rows)))[:more]] += 1
        return times


def weights_of(inputs: Sequence[InputEntry], given: Mapping[str, float]) -> tuple[float, ...]:
    """The weight of each file, given by its name with or without the ending; 1 by default."""
    there = ", ".join(entry.name for entry in inputs)
    weights: dict[int, float] = {}
    for name, weight in given.items():
        if not 0 <= weight <= HEAVIEST:
            raise UsageError(
                f"{SETTING} gives {name} the weight {weight:g}. Set the draws of each row in an "
                f"epoch from 0 to {HEAVIEST:g}."
            )
        exact = [index for index, entry in enumerate(inputs) if entry.name == name]
        stems = [n for n, entry in enumerate(inputs) if entry.name.partition(".")[0] == name]
        index, *others = exact or stems or [-1]
        if index < 0 or others:
            alike = ", ".join(inputs[one].name for one in (index, *others))
            what = f"may mean any of {alike}" if others else "is not a file of the cache"
            raise UsageError(f"{SETTING}: {name} {what}. Use one of its files: {there}.")
        if index in weights:
            raise UsageError(f"{SETTING} names {inputs[index].name} twice. Name it once.")
        weights[index] = weight
    found = tuple(weights.get(index, 1.0) for index in range(len(inputs)))
    by_content: dict[int, float] = {}
    for entry, weight in zip(inputs, found, strict=True):
        if by_content.setdefault(entry.identity, weight) != weight:
            raise UsageError(
                f"{SETTING}: {entry.name} has the same content as another file of the cache, so "
                "their rows cannot be distinguished. Give both the same weight."
            )
    return found
