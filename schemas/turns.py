"""Which tokens of a completion are learned: those of the assistant's turns, or of some of them.

A completion of several messages has a number for each of its tokens, 1 if it is learned and else 0.
A completion that is one turn of the assistant has 1 everywhere, which is not written down.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .columns import Ragged, offsets_of

WHOLE = 1  # the number of a token of a completion that is one turn


def learned_counts(turns: Ragged) -> NDArray[np.int64]:
    """The number of learned tokens of each completion."""
    return np.diff(offsets_of(turns.values > 0)[turns.offsets])
