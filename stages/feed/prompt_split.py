"""Shares of prompts, by their own keys: held out, or learned from with one of the labels.

The key of a prompt is the same in every cache. Prompts that differ only in white space, the system
message, tools and options of the template have the same key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .epoch_order import key_of, mixed

WHOLE = 2**64  # keys are below it


def held_out(split_keys: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Mask of the held-out rows: those with the lowest keys."""
    if fraction in {0.0, 1.0}:
        return np.full(len(split_keys), fraction == 1.0)
    return split_keys < np.uint64(int(fraction * WHOLE))


@dataclass(frozen=True)
class LabelShares:
    """The shares of prompts whose completions of a label are learned from.

    Desirable completions come from the prompts that are first in an order drawn by the seed,
    undesirable ones from those that are last: shares that add up to 1 have no prompt in common.
    """

    desirable: float = 1.0
    undesirable: float = 1.0
    seed: int = 0

    @property
    def are_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.desirable == self.undesirable == 1.0

    def with_desirable(self, split_keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Mask of the rows whose desirable completions are learned from."""
        return held_out(self._drawn(split_keys), self.desirable)

    def with_undesirable(self, split_keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Mask of the rows whose undesirable completions are learned from."""
        return ~held_out(self._drawn(split_keys), 1.0 - self.undesirable)

    def _drawn(self, split_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return mixed(split_keys, key_of("prompts with a label", self.seed))
