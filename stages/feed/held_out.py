"""Which prompts are held out for evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def held_out(split_keys: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """A prompt's own key decides, so it stands on the same side in every cache that holds it.

    Prompts that differ in nothing but white space, the system message, tools and options of the
    template have one key.
    """
    if fraction in {0.0, 1.0}:
        return np.full(len(split_keys), fraction == 1.0)
    return split_keys < np.uint64(int(fraction * 2**64))
