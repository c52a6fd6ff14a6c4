"""The batches the trainer reads, the engine it needs, and the samples of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from .row_table import Rows
    from .rows import Role, Tree


@dataclass(frozen=True)
class Cursor:
    """The next optimizer step to run, from which reading the data resumes."""

    epoch: int
    step: int  # within the epoch


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
    cursor: Cursor  # of this step
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


class Engine(Protocol):
    """One policy, sharded over the ranks in any way, with its forward pass and its updates."""

    @property
    def world(self) -> World:
        """This process among its peers."""
        ...

    def forward(self, trees: Sequence[Tree]) -> Mapping[str, Tensor]:
        """Outputs of the policy for every completion token, in the order tree, branch, token.

        `logps` (T,) float32; also `values` and `purity`, (T,) each, if the policy was loaded with
        them. Of a reward model `logps` are the branches' scores, (branches,). Where experts
        are balanced also `routing`, sums over all tokens: (layers, 2 * experts + 1) float64. All
        ranks call it together. No trees: empty tensors that still carry a (zero) gradient.
        """
        ...

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds this micro-batch's gradient; `loss` is this rank's part of the global mean."""
        ...

    def step(self) -> Update:
        """Clips, updates and clears the gradients; if one is not finite it only clears."""
        ...

    def skip(self) -> None:
        """Clears the gradients without an update, those of an interrupted pass too."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """The sum of float64 values over ranks."""
        ...

    def learn_mode(self, *, dropout_seed: int | None) -> None:
        """Sets training mode with dropout from this seed; None sets evaluation mode.

        Gradient checkpointing works in training mode only: gradients need a seed, even if the
        policy was loaded without dropout.
        """
        ...

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of the next update."""
        ...

    def save_state(self, folder: Path) -> tuple[str, ...]:
        """Writes this rank's state, from which it resumes bit for bit, into an empty folder.

        Returns the files this rank wrote, relative to the folder.
        """
        ...

    def load_state(self, folder: Path) -> None:
        """Loads what `save_state` wrote, in this world or another, under any ZeRO stage."""
        ...

    def weights(self, *, trainable_only: bool = False) -> Mapping[str, Tensor]:
        """The policy on the CPU, by the model's names, in its dtype; empty but on rank 0.

        All ranks call it together. Tied parameters are given once, saved buffers are included.
        """
        ...


@dataclass(frozen=True)
class EvalSample:
    """One completion of a held-out row, and the policy's numbers for it."""

    row: int  # counts the rows of the evaluation, as the method reads them
    row_id: str  # of the stored row it was made of
    role: Role
    num_tokens: int
    logp: float  # summed over the completion; of a reward model its score
    reference_logp: float
    reward: float | None  # None for a method without rewards
    prompt: NDArray[np.int32] | None  # token ids, where they are wanted
    completion: NDArray[np.int32] | None
