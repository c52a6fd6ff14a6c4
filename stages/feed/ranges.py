"""Several ranges of numbers as one array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...schemas.rows import offsets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


def joined_ranges(starts: NDArray[np.int64], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """`starts[i], starts[i] + 1, ...`, `lengths[i]` numbers of it, range after range."""
    offsets = offsets_of(lengths)
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1], dtype=np.int64)
