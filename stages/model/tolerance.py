"""How far two ways to compute the same log-prob may be apart before something is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Nats per token by which a score may differ when its batch had another shape.
PER_TOKEN = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
# In float32 short completions are held to this per sequence, however few their tokens.
LEAST = 1e-4


def allowed_gaps(num_tokens: NDArray[np.int64], *dtypes: str) -> NDArray[np.float64]:
    """What each sequence may differ by; the coarsest of the dtypes that took part counts."""
    per_token = max(PER_TOKEN[dtype] for dtype in dtypes)
    allowed: NDArray[np.float64] = np.maximum(LEAST, per_token * num_tokens)
    return allowed
