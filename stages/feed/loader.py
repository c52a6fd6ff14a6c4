"""The feed of the training loop: the batches of each step, read in a background thread.

Rows are kept in memory until their steps have run. A micro-batch keeps its rows in step order. So
its branches' step indices ascend, and with one rank and a large budget it is the step itself: the
assignment decides where a row runs, never the order in which rows are summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...schemas.batches import MicroBatch, StepBatch, StepSize
from ...schemas.columns import joined_ranges, offsets_of
from ...schemas.errors import damaged
from ...schemas.row_table import Rows
from ..storage.shards import open_shard, read_block
from .cache_index import GroupLocation, RowTable
from .row_selection import as_read
from .smaller_batches import cut_smaller
from .step_plan import (
    FeedSettings,
    Pass,
    StepPlan,
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
    """The batches of training rows, and of rows held out of them or from another cache."""

    source: TrainSource
    held_out_source: TrainSource
    settings: FeedSettings

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in each epoch."""
        return num_steps(self.source.rows_per_epoch, self.settings.batch_size)

    @property
    def planned_steps(self) -> int:
        """Optimizer steps in all epochs."""
        return steps_in(self.settings.epochs, self.steps_per_epoch)

    def rows_seen(self, steps: int) -> int:
        """The rows of so many steps, over all epochs."""
        return rows_seen(steps, self.source.rows_per_epoch, self.settings.batch_size)

    @property
    def has_held_out(self) -> bool:
        """Whether there are rows to evaluate on."""
        return self.held_out_source.eval_rows > 0

    def held_out_size(self) -> StepSize:
        """The size of an evaluation over all ranks."""
        return evaluation_pass(self.held_out_source.index.held_out, self.settings).size()

    def steps(self, done: int) -> Steps:
        """This rank's batches after so many steps, to the end of the last epoch."""
        start = divmod(done, self.steps_per_epoch)
        return _streamed(self.settings, _loads_of_epochs(self.source, self.settings, *start))

    def cut(self, batch: StepBatch, tokens: int) -> StepBatch:
        """A batch of a single rank in smaller micro-batches; the loss is the same."""
        return cut_smaller(batch, tokens, pads=self.settings.pads)

    def held_out(self) -> Steps:
        """This rank's batches of the held-out rows, the same each time."""
        source, settings = self.held_out_source, self.settings
        once = evaluation_pass(source.index.held_out, settings)
        return _streamed(settings, _loads(source, once, 0))


@dataclass(frozen=True)
class _Load:
    """The steps that one window completes, and the rows this rank needs for them."""

    one_pass: Pass
    plans: list[StepPlan]
    buffer: NumberedRows


@contextmanager
def _streamed(settings: FeedSettings, loads: Iterator[_Load]) -> Iterator[Iterator[StepBatch]]:
    with ThreadPoolExecutor(1, "align-prefetch") as reader:
        yield _batches(reader, loads, settings.world.rank)


def _batches(reader: Executor, loads: Iterator[_Load], rank: int) -> Iterator[StepBatch]:
    """The batches of one load after another, while a thread makes the next one."""
    ahead = reader.submit(next, loads, None)
    while load := ahead.result():
        ahead = reader.submit(next, loads, None)
        for plan in load.plans:
            yield step_batch(plan, load.buffer, load.one_pass.table, rank=rank)
        del load  # before the next one but one is begun, so that two at most are in memory


def _loads_of_epochs(
    source: TrainSource, settings: FeedSettings, begun: int, first: int
) -> Iterator[_Load]:
    for epoch in range(begun, math.ceil(settings.epochs)):
        one_pass = training_pass(source.index.train, settings, epoch=epoch)
        yield from _loads(source, one_pass, first)
        first = 0


def _loads(source: TrainSource, one_pass: Pass, first_step: int) -> Iterator[_Load]:
    """Loads of steps, window by window; rows of a step that continues in the next are kept."""
    planned, waiting, pieces = first_step, list[StepPlan](), list[NumberedRows]()
    order, size = one_pass.order, one_pass.settings.batch_size
    for window in range(order.window_at(first_step * size), order.num_windows):
        end = int(order.window_offsets[window + 1])
        begun = max(planned, min(-(-end // size), one_pass.num_steps))
        waiting += one_pass.plans(planned, begun)
        planned = begun
        if not waiting:
            return
        pieces += _pieces_of_window(source, one_pass, window, waiting)
        whole = sum(one_pass.end(plan.cursor.step) <= end for plan in waiting)
        if whole:
            load = _Load(one_pass, waiting[:whole], joined_rows(source, pieces))
            waiting = waiting[whole:]
            wanted = _wanted(one_pass, waiting)
            kept = (piece.keep(wanted) for piece in pieces)
            pieces = [piece for piece in kept if len(piece.numbers)]
            yield load


def _pieces_of_window(
    source: TrainSource, one_pass: Pass, window: int, plans: list[StepPlan]
) -> list[NumberedRows]:
    wanted = _wanted(one_pass, plans)
    groups = one_pass.order.groups_of(window)
    here = np.isin(one_pass.table.group_of(wanted), groups)
    return read_pieces(source, one_pass.table, wanted[here])


def _wanted(one_pass: Pass, plans: list[StepPlan]) -> NDArray[np.int64]:
    """The numbers of the rows that this rank needs for these steps."""
    rank = one_pass.settings.world.rank
    rows = [plan.rows_of_rank(rank) for plan in plans]
    return np.concatenate([np.empty(0, dtype=np.int64), *rows])


@dataclass(frozen=True)
class NumberedRows:
    """Some rows of a table as the method reads them, in any order."""

    numbers: NDArray[np.int64]  # in the table
    block: Rows

    def keep(self, numbers: NDArray[np.int64]) -> NumberedRows:
        """Only the rows that are in `numbers`."""
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
    """These rows of a table, read group by group; a row group is freed once its rows are copied."""
    groups = table.group_of(numbers)
    locations = source.index.group_locations
    pieces = []
    for group in np.unique(groups).tolist():
        here = np.unique(numbers[groups == group])  # a row may be drawn more than once
        indices = table.sizes.index_in_group[here].astype(np.int64)
        block = _read_group(source, locations[group], indices)
        pieces.append(NumberedRows(here, block))
    return pieces


def joined_rows(source: TrainSource, pieces: Sequence[NumberedRows]) -> NumberedRows:
    """The rows of all pieces; there may be none."""
    pieces = pieces or [NumberedRows(np.empty(0, np.int64), _no_rows(source))]
    numbers = np.concatenate([piece.numbers for piece in pieces])
    return NumberedRows(numbers, Rows.concat([piece.block for piece in pieces]))


# Columns that no step needs.
UNREAD = ("source", "prompt_key", "prompt_tokens", "prompt_cut", "cut", "num_tokens")


def _read_group(source: TrainSource, location: GroupLocation, rows: NDArray[np.int64]) -> Rows:
    """Rows of a row group, by their indices among the rows that are read of it."""
    shard = source.manifest.shards[location.shard]
    path = source.folder.shard(shard)
    with open_shard(path) as file:
        columns = [name for name in file.schema_arrow.names if name not in UNREAD]
        block = read_block(file.read_row_group(location.group, columns=columns, use_threads=False))
        if block.token_logps is None and source.manifest.fingerprint["cache.token_logps"] == "true":
            raise damaged(path, "it lacks the log-probs of tokens", "Make the cache again.")
        return as_read(block, rows, spec=source.spec, source=str(path))


def _no_rows(source: TrainSource) -> Rows:
    """An empty block with the columns of the cache."""
    shard = source.manifest.shards[0]
    with open_shard(source.folder.shard(shard)) as file:
        return read_block(file.schema_arrow.empty_table())


def step_batch(plan: StepPlan, buffer: NumberedRows, table: RowTable, *, rank: int) -> StepBatch:
    """The batch of one rank, whose rows are all in the buffer."""
    own_offsets = offsets_of(table.num_branches(plan.rows))
    return StepBatch(
        **vars(table.size_of(plan.rows)),
        mismatched_branches=len(plan.pairs),
        own=tuple(_own_batch(plan, buffer, rows, own_offsets) for rows in plan.own.of_rank(rank)),
        mismatched=tuple(
            _mismatched_batch(plan, buffer, plan.paired_rows[trees], own_offsets)
            for trees in plan.mismatched.of_rank(rank)
        ),
    )


def _own_batch(
    plan: StepPlan, buffer: NumberedRows, rows: NDArray[np.int64], own_offsets: NDArray[np.int64]
) -> MicroBatch:
    """The micro-batch of rows of the step, by ascending indices."""
    found, counts = buffer.find(plan.rows[rows]), np.diff(own_offsets)[rows]
    branches = joined_ranges(buffer.block.branch_offsets[found], counts)
    return _micro_batch(buffer, found, counts, branches, joined_ranges(own_offsets[rows], counts))


def _mismatched_batch(
    plan: StepPlan, buffer: NumberedRows, rows: NDArray[np.int64], own_offsets: NDArray[np.int64]
) -> MicroBatch:
    """The micro-batch of mismatched pairs of rows of the step, by ascending indices."""
    indices = np.flatnonzero(np.isin(plan.pairs.rows, rows))
    pairs = plan.pairs.take(indices)
    found = buffer.find(plan.rows[rows])
    row_of_pair = found[np.searchsorted(rows, pairs.rows)]
    num_own = np.diff(own_offsets)[pairs.rows]
    first = buffer.block.branch_offsets[row_of_pair]
    counts = np.diff(np.append(np.searchsorted(pairs.rows, rows), len(pairs)))
    branches = first + (1 + pairs.partners) * num_own + pairs.branches
    return _micro_batch(buffer, found, counts, branches, indices)


def _micro_batch(
    buffer: NumberedRows,
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],  # branches of each row
    branches: NDArray[np.int64],  # row by row
    step_indices: NDArray[np.int64],  # of the branches
) -> MicroBatch:
    # Copies: a batch that is kept must not keep the whole buffer alive.
    return MicroBatch(buffer.block.gather(rows, branches, offsets_of(counts)), step_indices)
