"""The batches that the trainer reads, and the samples of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .row_table import Rows
    from .rows import Role, Tree


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass on a rank; a rank with no rows left runs an empty one."""

    block: Rows  # in the order of the step, with the roles that the method reads
    step_indices: NDArray[np.int64]  # (completions,) index in the step, over all ranks

    @cached_property
    def row_ids(self) -> tuple[str, ...]:
        """The id of each row as text."""
        return self.block.ids()

    @cached_property
    def trees(self) -> tuple[Tree, ...]:
        """The prompt trees of the rows, the input of the policy."""
        return self.block.trees()


@dataclass(frozen=True)
class StepSize:
    """The size of a step, or of several, over all ranks."""

    rows: int
    completions: int
    tokens: int  # learned completion tokens
    chosen_tokens: int  # of chosen or desirable ones


@dataclass(frozen=True)
class StepBatch(StepSize):
    """One rank's micro-batches of an optimizer step, as many as any other rank's.

    The inherited counts are over all ranks.
    """

    mismatched_completions: int
    own: tuple[MicroBatch, ...]  # gradients flow through these
    mismatched: tuple[MicroBatch, ...]  # run without gradients, before the others


@dataclass(frozen=True)
class RowMargins:
    """Reward margins of a rank's training rows in one step, before the update."""

    row_ids: tuple[str, ...]
    margins: tuple[float, ...]  # reward of a row's good minus its bad completions
    are_ties: tuple[bool, ...]  # whether a margin differs from 0 only by rounding


@dataclass(frozen=True)
class World:
    """The rank of this process, and the number of ranks."""

    rank: int
    size: int
    local_rank: int

    @property
    def is_first_here(self) -> bool:
        """Whether this is the first rank of its machine; rank zero always is.

        A launcher may give a single process another local rank to choose its GPU.
        """
        return self.rank == 0 or self.local_rank == 0


@dataclass(frozen=True)
class Update:
    """The outcome of an optimizer step."""

    applied: bool  # false if a gradient was NaN or infinite on any rank
    grad_norm: float  # before clipping, over all ranks


@dataclass(frozen=True)
class EvalSample:
    """One completion of a held-out row, and the policy's numbers for it."""

    row: int  # counts the rows of the evaluation, as the method reads them
    row_id: str  # of the stored row
    prompt_key: str  # of the stored row, in hexadecimal
    role: Role
    num_tokens: int
    logp: float  # summed over the completion; for a reward model the score
    reference_logp: float
    reward: float | None  # None for a method without rewards
    prompt: NDArray[np.int32] | None  # token ids, with train.eval_text
    completion: NDArray[np.int32] | None
    set: str = ""  # the name of its held-out set, if it has one
