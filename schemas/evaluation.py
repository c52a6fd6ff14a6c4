"""What an evaluation says of single completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .rows import Role


@dataclass(frozen=True)
class Judged:
    """One completion of a held-out row, and what the policy thinks of it."""

    row: int  # counts the rows of the evaluation, as the method reads them
    row_id: str  # of the stored row it was made of
    role: Role
    num_tokens: int
    logp: float  # summed over the completion; of a reward model its score
    reference_logp: float
    reward: float | None  # what the loss compares; None of a method that compares nothing
    prompt: NDArray[np.int32] | None  # token ids, where they are wanted
    completion: NDArray[np.int32] | None
