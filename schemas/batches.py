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
    step_indices: NDArray[np.int64]  # (branches,) index in the step, over all ranks

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
    branches: int
    tokens: int  # of completions, those that are learned
    chosen_tokens: int  # of chosen or desirable ones


@dataclass(frozen=True)
class StepBatch(StepSize):
    """One rank's part of an optimizer step; every rank has the same number of micro-batches.

    The counts are of the whole step.
    """

    mismatched_branches: int
    own: tuple[MicroBatch, ...]  # gradients flow through these
    mismatched: tuple[MicroBatch, ...]  # run without gradients, before the others


@dataclass(frozen=True)
class Visits:
    """Training rows that a rank has run, with what the policy made of them before the update."""

    row_ids: tuple[str, ...]
    margins: tuple[float, ...]  # the rewards of a row's good completions less those of its bad ones
    are_ties: tuple[bool, ...]  # at most as far from 0 as rounding may take them


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    local_rank: int

    @property
    def is_first_here(self) -> bool:
        """Whether this is the first rank of its machine; rank zero is, whatever its launcher says.

        A single process may be given a local rank to choose its GPU.
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
    row_id: str  # of the stored row it was made of
    prompt_key: str  # that of the stored row, in hexadecimal
    role: Role
    num_tokens: int
    logp: float  # summed over the completion; of a reward model its score
    reference_logp: float
    reward: float | None  # None for a method without rewards
    prompt: NDArray[np.int32] | None  # token ids, where they are wanted
    completion: NDArray[np.int32] | None
