"""What the trainer is fed: the rows of one optimizer step, cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from .ragged import Ragged
    from .rows import Tree


@dataclass(frozen=True)
class Cursor:
    """The next optimizer step to run: all that has to be known of the data to go on."""

    epoch: int
    step: int  # within the epoch


@dataclass(frozen=True)
class MicroBatch:
    """Rows one rank runs in one forward pass; a rank with nothing left runs an empty one."""

    trees: tuple[Tree, ...]  # a row each; their branches are those below, in order
    roles: NDArray[np.int8]  # (branches,) as the method reads them
    reference: NDArray[np.float64]  # (branches,)
    scores: NDArray[np.float64]  # (branches,) NaN where the data gives none
    places: NDArray[np.int64]  # (branches,) each branch's place in the step, over all ranks
    reference_tokens: Ragged | None  # (branches,) float32, when the cache keeps them
    carried: Mapping[str, NDArray[np.float64]]  # each (rows,)
    row_ids: tuple[str, ...]  # (rows,)


@dataclass(frozen=True)
class StepSize:
    """What a step holds over all ranks."""

    rows: int
    branches: int
    tokens: int  # of completions
    chosen_tokens: int  # of chosen or desirable ones


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of an optimizer step; every rank has as many micro-batches."""

    cursor: Cursor  # of this step
    own: tuple[MicroBatch, ...]  # gradients flow through these
    mismatched: tuple[MicroBatch, ...]  # run without gradients, before the others
    rows: int  # from here on: of the whole step, over all ranks
    branches: int
    tokens: int
    chosen_tokens: int
    mismatched_branches: int
