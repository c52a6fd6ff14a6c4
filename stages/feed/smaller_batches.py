"""Cuts a step that has been read into smaller micro-batches, as if it had been planned so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...schemas.batches import MicroBatch, StepBatch
from ...schemas.columns import joined_ranges
from ...schemas.row_table import Rows
from .step_plan import assign_batches


def cut_smaller(batch: StepBatch, budget: int, *, pads: bool) -> StepBatch:
    """The step of a single rank in micro-batches of at most `budget` tokens."""
    own, mismatched = (_cut(micros, budget, pads=pads) for micros in (batch.own, batch.mismatched))
    return replace(batch, own=own, mismatched=mismatched)


def _cut(micros: Sequence[MicroBatch], budget: int, *, pads: bool) -> tuple[MicroBatch, ...]:
    if not micros:
        return ()
    whole = Rows.concat([micro.block for micro in micros])
    indices = np.concatenate([micro.step_indices for micro in micros])
    ends = whole.branch_offsets
    order = np.argsort(indices[ends[:-1]])  # in step order, as they were planned
    lengths = np.array([tree.num_tokens for micro in micros for tree in micro.trees], np.int64)
    plan = assign_batches(lengths[order], world_size=1, budget=budget, pads=pads)
    return tuple(
        MicroBatch(whole.take(rows), indices[joined_ranges(ends[rows], np.diff(ends)[rows])])
        for rows in (order[turn] for turn in plan.of_rank(0))
    )
