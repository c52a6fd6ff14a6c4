"""Which prompts are held out for evaluation."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...schemas.ragged import Ragged

_SALT = b"align held out"


def held_out(prompts: Ragged, fraction: float) -> NDArray[np.bool_]:
    """A prompt's own ids decide, so it stands on the same side in every cache that holds it."""
    if fraction in {0.0, 1.0}:
        return np.full(len(prompts), fraction == 1.0)
    limit = int(fraction * 2**64)
    return np.fromiter((place_of(ids) < limit for ids in prompts), np.bool_, count=len(prompts))


def place_of(ids: NDArray[np.int32]) -> int:
    """A prompt as a number, evenly spread over 64 bits."""
    stored = np.ascontiguousarray(ids, dtype="<i4").data
    return int.from_bytes(blake2b(stored, digest_size=8, person=_SALT).digest(), "little")
