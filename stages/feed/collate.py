"""From rows in memory and the plan of a step to one rank's share of it.

A micro-batch keeps its rows in step order. So its branches' places ascend, and with one rank and a
large budget it is the step itself: what the deal decides is where a row runs, never beside what
it is summed first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.batches import MicroBatch, StepBatch
from ...schemas.rows import Tree, offsets_of
from .ranges import joined_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .row_table import RowTable
    from .shelf import Shelf
    from .steps import StepPlan


def step_batch(plan: StepPlan, shelf: Shelf, table: RowTable, *, rank: int) -> StepBatch:
    """The share of one rank, all of whose rows lie on the shelf."""
    own_offsets = offsets_of(table.num_branches(plan.rows))
    return StepBatch(
        cursor=plan.cursor,
        own=tuple(_own_batch(plan, shelf, rows, own_offsets) for rows in plan.own.of_rank(rank)),
        mismatched=tuple(
            _mismatched_batch(plan, shelf, plan.paired_rows[trees], own_offsets)
            for trees in plan.mismatched.of_rank(rank)
        ),
        rows=len(plan.rows),
        branches=int(own_offsets[-1]),
        tokens=int(table.own_tokens[plan.rows].sum(dtype=np.int64)),
        chosen_tokens=int(table.chosen_tokens[plan.rows].sum(dtype=np.int64)),
        mismatched_branches=len(plan.pairs),
    )


@dataclass(frozen=True)
class _Picked:
    """The rows and branches of one micro-batch."""

    rows: NDArray[np.int64]  # (rows,) in the shelf's block
    counts: NDArray[np.int64]  # (rows,) branches of each
    branches: NDArray[np.int64]  # (branches,) in the shelf's block, row by row
    places: NDArray[np.int64]  # (branches,) in the step


def _own_batch(
    plan: StepPlan, shelf: Shelf, rows: NDArray[np.int64], own_offsets: NDArray[np.int64]
) -> MicroBatch:
    """`rows` are places in the step, ascending."""
    found, counts = shelf.find(plan.rows[rows]), np.diff(own_offsets)[rows]
    picked = _Picked(
        rows=found,
        counts=counts,
        branches=joined_ranges(shelf.block.rows.branch_offsets[found], counts),
        places=joined_ranges(own_offsets[rows], counts),
    )
    return _micro_batch(shelf, picked)


def _mismatched_batch(
    plan: StepPlan, shelf: Shelf, rows: NDArray[np.int64], own_offsets: NDArray[np.int64]
) -> MicroBatch:
    """`rows` are places in the step, ascending; each has a pair at least."""
    places = np.flatnonzero(np.isin(plan.pairs.rows, rows))
    pairs = plan.pairs.take(places)
    found = shelf.find(plan.rows[rows])
    row_of_pair = found[np.searchsorted(rows, pairs.rows)]
    num_own = np.diff(own_offsets)[pairs.rows]
    first = shelf.block.rows.branch_offsets[row_of_pair]
    picked = _Picked(
        rows=found,
        counts=np.diff(np.append(np.searchsorted(pairs.rows, rows), len(pairs))),
        branches=first + (1 + pairs.levels) * num_own + pairs.branches,
        places=places,
    )
    return _micro_batch(shelf, picked)


def _micro_batch(shelf: Shelf, picked: _Picked) -> MicroBatch:
    rows, branches = shelf.block.rows, picked.branches
    kept = shelf.block.token_logps
    # Copies of what it needs: a batch that somebody keeps must not keep the whole shelf alive.
    prompts, completions = rows.prompts.take(picked.rows), rows.completions.take(branches)
    ends = np.cumsum(picked.counts).tolist()
    starts = [0, *ends[:-1]]
    return MicroBatch(
        trees=tuple(
            Tree(prompt, tuple(completions[branch] for branch in range(start, end)))
            for prompt, start, end in zip(prompts, starts, ends, strict=False)
        ),
        roles=rows.roles[branches],
        reference=shelf.block.logps[branches],
        scores=rows.scores[branches],
        places=picked.places,
        reference_tokens=None if kept is None else kept.take(branches),
        carried={name: column[picked.rows] for name, column in rows.carried.items()},
        row_ids=tuple(shelf.row_ids[row] for row in picked.rows.tolist()),
    )
