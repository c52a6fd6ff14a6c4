"""One more chance for what has no finite log-prob: alone, and in float32."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.rows import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...schemas.rows import Scorer, Tree


def score_again(trees: Sequence[Tree], scorer: Scorer) -> list[NDArray[np.float32]]:
    """Scores each tree by itself in float32; NaN where there is no room for that."""
    scores = [np.full(sum(map(len, tree.branches)), np.nan, np.float32) for tree in trees]
    with suppress(OutOfMemory), scorer.in_float32():
        for place, tree in enumerate(trees):
            with suppress(OutOfMemory):
                scores[place] = scorer.score([tree])
    return scores
