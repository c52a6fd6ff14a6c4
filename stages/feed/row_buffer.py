"""Batches of one rank, made from rows that are kept in memory until their steps have run.

A micro-batch keeps its rows in step order. So its branches' places ascend, and with one rank and a
large budget it is the step itself: the assignment decides where a row runs, never in which order
rows are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...schemas.batches import MicroBatch, StepBatch
from ...schemas.rows import Ragged, RowBlock, ScoredBlock, Tree, offsets_of
from ..storage.shards import open_shard, read_block, row_ids
from .cache_index import RowTable, naming_unit
from .conversions import joined_ranges
from .row_selection import as_read
from .step_plan import StepPlan
from .train_source import TrainSource


@dataclass(frozen=True)
class Piece:
    """Some rows of a row group."""

    numbers: NDArray[np.int64]  # (rows,) row numbers, in the order of the block
    block: ScoredBlock

    def keep(self, numbers: NDArray[np.int64]) -> Piece:
        """Those of its rows that are among `numbers`."""
        kept = np.flatnonzero(np.isin(self.numbers, numbers))
        return Piece(self.numbers[kept], self.block.take(kept))


@dataclass(frozen=True)
class RowBuffer:
    """Rows by their numbers, as the method reads them."""

    numbers: NDArray[np.int64]  # (rows,) ascending
    order: NDArray[np.int64]  # (rows,) where each stands in the block
    block: ScoredBlock
    row_ids: Sequence[str]  # (rows,) in the order of the block

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where these rows stand in the block."""
        return self.order[np.searchsorted(self.numbers, numbers)]


def read_pieces(source: TrainSource, table: RowTable, numbers: NDArray[np.int64]) -> list[Piece]:
    """Reads these rows of a table; a row group is freed once its rows are taken."""
    groups = table.group_of(numbers)
    pieces = []
    for group in np.unique(groups).tolist():
        here = np.sort(numbers[groups == group])
        block = _read_group(source, group, table.places[here].astype(np.int64))
        pieces.append(Piece(here, block))
    return pieces


def fill_buffer(source: TrainSource, pieces: Sequence[Piece]) -> RowBuffer:
    """Puts pieces together; there may be none."""
    numbers = np.concatenate([np.empty(0, dtype=np.int64), *(piece.numbers for piece in pieces)])
    order = np.argsort(numbers)
    block = _joined(source, pieces)
    return RowBuffer(numbers[order], order, block, row_ids(block.rows))


def _read_group(source: TrainSource, group: int, rows: NDArray[np.int64]) -> ScoredBlock:
    """`rows` are places among what the row group is read as."""
    place = source.index.places[group]
    path = source.folder.data / source.manifest.shards[place.unit].file
    with naming_unit(place.unit), open_shard(path) as file:
        table = file.read_row_group(place.group, use_threads=False)
        block = read_block(table, source=str(path))
        return as_read(block, rows, reading=source.reading, source=str(path))


def _joined(source: TrainSource, pieces: Sequence[Piece]) -> ScoredBlock:
    blocks = [piece.block for piece in pieces] or [_no_rows(source)]
    kept = [block.token_logps for block in blocks if block.token_logps is not None]
    return ScoredBlock(
        RowBlock.concat([block.rows for block in blocks]),
        np.concatenate([block.logps for block in blocks]),
        Ragged.concat(kept) if kept else None,
    )


def _no_rows(source: TrainSource) -> ScoredBlock:
    """A block with the columns of the cache."""
    path = source.folder.data / source.manifest.shards[0].file
    with naming_unit(0), open_shard(path) as file:
        return read_block(file.schema_arrow.empty_table(), source=str(path))


def step_batch(plan: StepPlan, buffer: RowBuffer, table: RowTable, *, rank: int) -> StepBatch:
    """The batch of one rank; all of its rows are in the buffer."""
    own_offsets = offsets_of(table.num_branches(plan.rows))
    return StepBatch(
        cursor=plan.cursor,
        own=tuple(_own_batch(plan, buffer, rows, own_offsets) for rows in plan.own.of_rank(rank)),
        mismatched=tuple(
            _mismatched_batch(plan, buffer, plan.paired_rows[trees], own_offsets)
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

    rows: NDArray[np.int64]  # (rows,) in the block of the buffer
    counts: NDArray[np.int64]  # (rows,) branches of each
    branches: NDArray[np.int64]  # (branches,) in the block of the buffer, row by row
    places: NDArray[np.int64]  # (branches,) in the step


def _own_batch(
    plan: StepPlan, buffer: RowBuffer, rows: NDArray[np.int64], own_offsets: NDArray[np.int64]
) -> MicroBatch:
    """`rows` are places in the step, ascending."""
    found, counts = buffer.find(plan.rows[rows]), np.diff(own_offsets)[rows]
    picked = _Picked(
        rows=found,
        counts=counts,
        branches=joined_ranges(buffer.block.rows.branch_offsets[found], counts),
        places=joined_ranges(own_offsets[rows], counts),
    )
    return _micro_batch(buffer, picked)


def _mismatched_batch(
    plan: StepPlan, buffer: RowBuffer, rows: NDArray[np.int64], own_offsets: NDArray[np.int64]
) -> MicroBatch:
    """`rows` are places in the step, ascending; each has a pair at least."""
    places = np.flatnonzero(np.isin(plan.pairs.rows, rows))
    pairs = plan.pairs.take(places)
    found = buffer.find(plan.rows[rows])
    row_of_pair = found[np.searchsorted(rows, pairs.rows)]
    num_own = np.diff(own_offsets)[pairs.rows]
    first = buffer.block.rows.branch_offsets[row_of_pair]
    picked = _Picked(
        rows=found,
        counts=np.diff(np.append(np.searchsorted(pairs.rows, rows), len(pairs))),
        branches=first + (1 + pairs.levels) * num_own + pairs.branches,
        places=places,
    )
    return _micro_batch(buffer, picked)


def _micro_batch(buffer: RowBuffer, picked: _Picked) -> MicroBatch:
    rows, branches = buffer.block.rows, picked.branches
    kept = buffer.block.token_logps
    # Copies: a batch that is kept must not keep the whole buffer alive.
    prompts, completions = rows.prompts.take(picked.rows), rows.completions.take(branches)
    ends = np.cumsum(picked.counts).tolist()
    starts = [0, *ends[:-1]]
    return MicroBatch(
        trees=tuple(
            Tree(prompt, tuple(completions[branch] for branch in range(start, end)))
            for prompt, start, end in zip(prompts, starts, ends, strict=False)
        ),
        roles=rows.roles[branches],
        reference=buffer.block.logps[branches],
        scores=rows.scores[branches],
        places=picked.places,
        reference_tokens=None if kept is None else kept.take(branches),
        carried={name: column[picked.rows] for name, column in rows.carried.items()},
        row_ids=tuple(buffer.row_ids[row] for row in picked.rows.tolist()),
    )
