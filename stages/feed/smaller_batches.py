"""Cuts a step that has been read into other micro-batches, as if it had been planned so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from ...schemas.batches import MicroBatch, StepBatch
from ...schemas.rows import ScoredBlock
from .step_plan import assign_batches


def cut_smaller(batch: StepBatch, budget: int, *, pads: bool) -> StepBatch:
    """The same rows in micro-batches of at most so many tokens, for a rank that is alone."""
    own, mismatched = (_cut(micros, budget, pads=pads) for micros in (batch.own, batch.mismatched))
    return replace(batch, own=own, mismatched=mismatched)


def _cut(micros: Sequence[MicroBatch], budget: int, *, pads: bool) -> tuple[MicroBatch, ...]:
    rows = [_row(micro, index) for micro in micros for index in range(len(micro.trees))]
    rows.sort(key=lambda row: int(row.places[0]))  # in step order, as they were planned
    lengths = np.array([row.trees[0].num_tokens for row in rows], np.int64)
    plan = assign_batches(lengths, world_size=1, budget=budget, pads=pads)
    return tuple(_joined([rows[row] for row in turn.tolist()]) for turn in plan.of_rank(0))


def _row(micro: MicroBatch, index: int) -> MicroBatch:
    """A row as a micro-batch of its own."""
    begin, end = micro.block.rows.branch_offsets[index : index + 2]
    block = micro.block.take(np.array([index]))
    return MicroBatch(block, micro.places[begin:end], (micro.row_ids[index],))


def _joined(rows: Sequence[MicroBatch]) -> MicroBatch:
    return MicroBatch(
        ScoredBlock.concat([row.block for row in rows]),
        np.concatenate([row.places for row in rows]),
        tuple(chain.from_iterable(row.row_ids for row in rows)),
    )
