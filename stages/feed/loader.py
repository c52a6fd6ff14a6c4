"""The feed of the training loop: the batches of each step, read in a background thread.

Rows stay in memory until their steps have run. A micro-batch keeps its rows in step order, so the
assignment decides where a row runs, but never the order in which rows are summed. With one rank and
a large budget, the micro-batch is the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...schemas.batches import MicroBatch, StepBatch, StepSize
from ...schemas.cache import Shard
from ...schemas.columns import joined_ranges, offsets_of
from ...schemas.errors import damaged
from ...schemas.row_table import Rows
from ..storage.shards import open_shard, read_block
from .cache_index import RowTable
from .select import as_read
from .step_plan import (
    FeedSettings,
    Pass,
    StepPlan,
    assign_batches,
    evaluation_pass,
    num_steps,
    rows_seen,
    steps_in,
    training_pass,
)
from .train_source import TrainSource

Steps = AbstractContextManager[Iterator[StepBatch]]


@dataclass(frozen=True)
class CacheFeed:
    """The batches of training rows, and of evaluation rows, held out or from another cache."""

    source: TrainSource
    held_out_sources: Mapping[str, TrainSource]  # by the name of the set; one has none
    settings: FeedSettings

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in each epoch."""
        return num_steps(self.source.train.rows_per_epoch, self.settings.batch_size)

    @property
    def planned_steps(self) -> int:
        """Optimizer steps in all epochs."""
        return steps_in(self.settings.epochs, self.steps_per_epoch)

    def rows_seen(self, steps: int) -> int:
        """The number of rows in so many steps, over all epochs."""
        return rows_seen(steps, self.source.train.rows_per_epoch, self.settings.batch_size)

    @property
    def eval_rows(self) -> int:
        """The number of rows to evaluate on."""
        return sum(source.eval_rows for source in self.held_out_sources.values())

    def held_out_size(self, name: str = "") -> StepSize:
        """The size of an evaluation on a set over all ranks."""
        return evaluation_pass(self.held_out_sources[name].held_out, self.settings).size()

    def steps(self, done: int) -> Steps:
        """This rank's batches from step `done` to the end of the last epoch."""
        table, settings = self.source.train, self.settings
        begun, first = divmod(done, self.steps_per_epoch)
        epochs = range(begun, math.ceil(settings.epochs))
        passes = (training_pass(table, settings, epoch=epoch) for epoch in epochs)
        return _streamed(self.source, passes, first, settings.world.rank)

    def held_out(self, name: str = "") -> Steps:
        """This rank's batches of the rows of a held-out set, the same each time."""
        source, settings = self.held_out_sources[name], self.settings
        passes = [evaluation_pass(source.held_out, settings)]
        return _streamed(source, passes, 0, settings.world.rank)

    def cut(self, batch: StepBatch, tokens: int) -> StepBatch:
        """A single rank's batch, cut into micro-batches of at most so many tokens.

        They equal the micro-batches of a plan with this budget, so the loss is the same.
        """
        pads = self.settings.pads
        own, mismatched = (_cut(some, tokens, pads=pads) for some in (batch.own, batch.mismatched))
        return replace(batch, own=own, mismatched=mismatched)


@contextmanager
def _streamed(
    source: TrainSource, passes: Iterable[Pass], first: int, rank: int
) -> Iterator[Iterator[StepBatch]]:
    """The batches of one pass after another, from step `first` of the first one on."""
    with ThreadPoolExecutor(1, "align-prefetch") as reader:
        yield _batches(reader, _loads(source, passes, first, rank), rank)


def _batches(reader: Executor, loads: Iterator[_Load], rank: int) -> Iterator[StepBatch]:
    """The batches of each load, while a thread reads the next one."""
    ahead = reader.submit(next, loads, None)
    while load := ahead.result():
        ahead = reader.submit(next, loads, None)
        for plan in load.plans:
            yield step_batch(plan, load.buffer, load.table, rank=rank)
        del load  # so that at most two loads are in memory


@dataclass(frozen=True)
class _Load:
    """The steps that a window completes, and this rank's rows for them."""

    table: RowTable
    plans: list[StepPlan]
    buffer: NumberedRows


def _loads(source: TrainSource, passes: Iterable[Pass], first: int, rank: int) -> Iterator[_Load]:
    """Loads of steps, window by window; the rows of an unfinished step stay for the next one."""
    for one_pass in passes:
        table, order, size = one_pass.table, one_pass.order, one_pass.settings.batch_size
        planned, waiting, pieces = first, list[StepPlan](), list[NumberedRows]()
        for window in range(order.window_at(first * size), order.num_windows):
            end = int(order.window_offsets[window + 1])
            begun = max(planned, min(-(-end // size), one_pass.num_steps))
            waiting += one_pass.plans(planned, begun)
            planned = begun
            if not waiting:
                break
            wanted = _rows_of(waiting, rank)
            here = np.isin(table.group_of(wanted), order.groups_of(window))
            pieces += read_pieces(source, table, wanted[here])
            whole = sum(one_pass.end(plan.step) <= end for plan in waiting)
            if whole:
                load = _Load(table, waiting[:whole], joined_rows(source, pieces))
                waiting = waiting[whole:]
                wanted = _rows_of(waiting, rank)
                kept = (piece.keep(wanted) for piece in pieces)
                pieces = [piece for piece in kept if len(piece.numbers)]
                yield load
        first = 0


def _rows_of(plans: list[StepPlan], rank: int) -> NDArray[np.int64]:
    """The numbers of this rank's rows in these steps."""
    return np.concatenate([np.empty(0, np.int64), *(plan.rows_of_rank(rank) for plan in plans)])


@dataclass(frozen=True)
class NumberedRows:
    """Some rows of a table as the method reads them, in any order."""

    numbers: NDArray[np.int64]  # in the table
    block: Rows

    def keep(self, numbers: NDArray[np.int64]) -> NumberedRows:
        """Only the rows in `numbers`."""
        kept = np.flatnonzero(np.isin(self.numbers, numbers))
        return NumberedRows(self.numbers[kept], self.block.take(kept))

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices of these rows."""
        return self._order[np.searchsorted(self.numbers, numbers, sorter=self._order)]

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(self.numbers)


def read_pieces(
    source: TrainSource, table: RowTable, numbers: NDArray[np.int64]
) -> list[NumberedRows]:
    """These rows of a table, copied row group by row group."""
    groups = table.group_of(numbers)
    pieces = []
    for group in np.unique(groups).tolist():
        here = np.unique(numbers[groups == group])  # a row may be drawn more than once
        indices = table.sizes.index_in_group[here].astype(np.int64)
        shard, number = source.row_groups[group]
        block = _read_group(source, shard, number, indices)
        pieces.append(NumberedRows(here, block))
    return pieces


# Columns that no step needs.
UNREAD = ("source", "prompt_tokens", "prompt_cut", "cut", "num_tokens")


def _read_group(source: TrainSource, shard: Shard, group: int, rows: NDArray[np.int64]) -> Rows:
    """Rows of a row group, by their indices among the rows that the method reads."""
    path = source.folder.shard(shard)
    with open_shard(path) as file:
        columns = [name for name in file.schema_arrow.names if name not in UNREAD]
        block = read_block(file.read_row_group(group, columns=columns, use_threads=False))
        if block.token_logps is None and source.manifest.fingerprint["cache.token_logps"] == "true":
            raise damaged(path, "it has no token log-probs", "Make the cache again.")
        return as_read(block, rows, spec=source.spec, source=str(path))


def joined_rows(source: TrainSource, pieces: Sequence[NumberedRows]) -> NumberedRows:
    """The rows of all pieces; without pieces, an empty table with the cache's columns."""
    if not pieces:
        with open_shard(source.folder.shard(source.manifest.shards[0])) as file:
            empty = read_block(file.schema_arrow.empty_table())
        pieces = [NumberedRows(np.empty(0, np.int64), empty)]
    numbers = np.concatenate([piece.numbers for piece in pieces])
    return NumberedRows(numbers, Rows.concat([piece.block for piece in pieces]))


def step_batch(plan: StepPlan, buffer: NumberedRows, table: RowTable, *, rank: int) -> StepBatch:
    """The batch of one rank, whose rows are all in the buffer."""
    counts, stored = table.num_completions(plan.rows), buffer.block.completion_offsets
    offsets = offsets_of(counts)

    # Copies: a batch that is kept must not keep the whole buffer alive.
    own, mismatched = list[MicroBatch](), list[MicroBatch]()
    for rows in plan.own.of_rank(rank):
        found, of_row = buffer.find(plan.rows[rows]), counts[rows]
        completions, indices = (
            joined_ranges(stored[found], of_row),
            joined_ranges(offsets[rows], of_row),
        )
        block = buffer.block.gather(found, completions, offsets_of(of_row))
        own.append(MicroBatch(block, indices))
    for trees in plan.mismatched.of_rank(rank):
        rows = plan.paired_rows[trees]
        indices = np.flatnonzero(np.isin(plan.pairs.rows, rows))
        pairs, found = plan.pairs.take(indices), buffer.find(plan.rows[rows])
        row_of = np.searchsorted(rows, pairs.rows)
        # A row has its own completions, then the first KL completion of each, then the second.
        completions = (
            stored[found[row_of]] + (1 + pairs.partners) * counts[pairs.rows] + pairs.completions
        )
        ends = offsets_of(np.bincount(row_of, minlength=len(rows)))
        mismatched.append(MicroBatch(buffer.block.gather(found, completions, ends), indices))
    return StepBatch(
        **vars(table.size_of(plan.rows)),
        mismatched_completions=len(plan.pairs),
        own=tuple(own),
        mismatched=tuple(mismatched),
    )


def _cut(micros: Sequence[MicroBatch], budget: int, *, pads: bool) -> tuple[MicroBatch, ...]:
    if not micros:
        return ()
    whole = Rows.concat([micro.block for micro in micros])
    indices = np.concatenate([micro.step_indices for micro in micros])
    ends = whole.completion_offsets
    order = np.argsort(indices[ends[:-1]])  # in step order, as they were planned
    lengths = np.array([tree.num_tokens for micro in micros for tree in micro.trees], np.int64)
    plan = assign_batches(lengths[order], world_size=1, budget=budget, pads=pads)
    return tuple(
        MicroBatch(whole.take(rows), indices[joined_ranges(ends[rows], np.diff(ends)[rows])])
        for rows in (order[turn] for turn in plan.of_rank(0))
    )
