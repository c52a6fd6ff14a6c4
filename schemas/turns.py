"""Which tokens of a completion are learned: those of the assistant's turns, or of some of them.

A completion of several messages has a number for each of its tokens: 0 outside of the assistant's
turns; else n or -n, where 2t - 1 stands for the assistant's t-th turn and 2t for that one if the
data say that it is not to be learned. What the cache's sums count is positive. A completion that is
one turn of the assistant has 1 everywhere, which is not written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .columns import Ragged, offsets_of

Learn: TypeAlias = Literal["assistant", "last", "all"]
WHOLE = 1  # the number of a token of a completion that is one turn


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant: the tokens of a completion from one to another."""

    start: int
    stop: int
    is_marked: bool = False  # the data say that it is not to be learned


def numbered(length: int, turns: Sequence[Turn], learn: Learn) -> NDArray[np.int16]:
    """The numbers of a completion's tokens, those that are learned positive."""
    numbers = np.zeros(length, dtype=np.int16)
    for index, turn in enumerate(turns):
        numbers[turn.start : turn.stop] = 2 * index + 1 + turn.is_marked
    is_counted = chosen(Ragged(numbers, np.array([0, length])), learn)
    return np.where(is_counted, numbers, -numbers).astype(np.int16)


def chosen(turns: Ragged, learn: Learn) -> NDArray[np.bool_]:
    """Mask of the tokens of all completions that are learned under a choice."""
    numbers = np.abs(turns.values)
    if learn == "all":
        return np.ones(len(numbers), dtype=np.bool_)
    is_learned: NDArray[np.bool_] = numbers % 2 == 1
    if learn == "last" and len(numbers):
        last = np.maximum.reduceat(numbers, turns.offsets[:-1])
        is_learned &= (numbers + 1) // 2 == np.repeat((last + 1) // 2, turns.lengths)
    return is_learned


def learned_counts(turns: Ragged) -> NDArray[np.int64]:
    """The number of learned tokens of each completion."""
    return np.diff(offsets_of(turns.values > 0)[turns.offsets])
