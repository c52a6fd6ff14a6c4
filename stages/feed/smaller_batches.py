"""Cuts a step that has been read into other micro-batches, as if it had been planned so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ...schemas.batches import MicroBatch, StepBatch
from ...schemas.rows import Ragged, offsets_of
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
    ends = offsets_of(np.array([len(tree.branches) for tree in micro.trees], np.int64))
    here = slice(int(ends[index]), int(ends[index + 1]))
    tokens = micro.reference_tokens
    return MicroBatch(
        trees=(micro.trees[index],),
        roles=micro.roles[here],
        reference=micro.reference[here],
        scores=micro.scores[here],
        places=micro.places[here],
        reference_tokens=None if tokens is None else tokens.slice(here.start, here.stop),
        carried={name: values[index : index + 1] for name, values in micro.carried.items()},
        row_ids=(micro.row_ids[index],),
    )


def _joined(rows: Sequence[MicroBatch]) -> MicroBatch:
    def every(name: str) -> NDArray[np.generic]:
        return np.concatenate([getattr(row, name) for row in rows])

    tokens = [row.reference_tokens for row in rows if row.reference_tokens is not None]
    return MicroBatch(
        trees=tuple(chain.from_iterable(row.trees for row in rows)),
        roles=every("roles").astype(np.int8),
        reference=every("reference").astype(np.float64),
        scores=every("scores").astype(np.float64),
        places=every("places").astype(np.int64),
        reference_tokens=Ragged.concat(tokens) if tokens else None,
        carried={
            name: np.concatenate([row.carried[name] for row in rows]) for name in rows[0].carried
        },
        row_ids=tuple(chain.from_iterable(row.row_ids for row in rows)),
    )
