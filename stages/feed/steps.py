"""The plan of one step: which rows and mismatched branches it has, and where each of them runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.batches import Cursor, StepSize
from .deal import Deal, deal
from .mixing import key_of, shuffled
from .order import Order, shuffled_order, stored_order
from .ranges import joined_ranges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .row_table import RowTable
    from .settings import FeedSettings


@dataclass(frozen=True)
class Pairs:
    """The mismatched branches of a step, in step order: row by row, level by level."""

    rows: NDArray[np.int64]  # (pairs,) places of their rows in the step
    branches: NDArray[np.int64]  # (pairs,) the row's own branch each stands against
    levels: NDArray[np.int64]  # (pairs,) which of that branch's partners

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, places: NDArray[np.int64]) -> Pairs:
        """The pairs at `places`, in that order."""
        return Pairs(self.rows[places], self.branches[places], self.levels[places])


@dataclass(frozen=True)
class StepPlan:
    """One step over all ranks; what it holds depends on neither world nor token budget."""

    cursor: Cursor
    rows: NDArray[np.int64]  # (rows,) row numbers in step order
    own: Deal  # of these rows
    pairs: Pairs
    paired_rows: NDArray[np.int64]  # (trees,) places in the step of the rows that have pairs
    mismatched: Deal  # of these trees

    def rows_of_rank(self, rank: int) -> NDArray[np.int64]:
        """The row numbers a rank has to read."""
        own = np.flatnonzero(self.own.ranks == rank)
        mismatched = self.paired_rows[self.mismatched.ranks == rank]
        numbers: NDArray[np.int64] = self.rows[np.union1d(own, mismatched)]
        return numbers


@dataclass(frozen=True)
class Pass:
    """One way through the rows of a table: an epoch, or an evaluation."""

    table: RowTable
    order: Order
    settings: FeedSettings
    epoch: int
    num_steps: int
    key: int  # draws mismatched branches where a step has too many

    def end(self, step: int) -> int:
        """The position behind the last row of a step."""
        return min((step + 1) * self.settings.batch_size, len(self.order))

    def size(self) -> StepSize:
        """All of its steps taken together."""
        rows = self.order.rows(0, self.end(self.num_steps - 1))
        return StepSize(
            rows=len(rows),
            branches=int(self.table.num_branches(rows).sum()),
            tokens=int(self.table.own_tokens[rows].sum(dtype=np.int64)),
            chosen_tokens=int(self.table.chosen_tokens[rows].sum(dtype=np.int64)),
        )

    def plans(self, start: int, stop: int) -> Iterator[StepPlan]:
        """The plans of steps `start` to `stop`."""
        if start >= stop:
            return
        begin = start * self.settings.batch_size
        rows = self.order.rows(begin, self.end(stop - 1))
        for step in range(start, stop):
            first = step * self.settings.batch_size - begin
            yield self._plan(step, rows[first : self.end(step) - begin])

    def _plan(self, step: int, rows: NDArray[np.int64]) -> StepPlan:
        pairs = self._pairs(step, rows)
        trees, tree_of_pair = np.unique(pairs.rows, return_inverse=True)
        branches = self.table.branch_offsets[rows[pairs.rows]] + pairs.branches
        lengths = self.table.prompt_tokens[rows[trees]].astype(np.int64)
        np.add.at(lengths, tree_of_pair, self.table.mismatched_tokens[branches, pairs.levels])
        own_lengths = self.table.prompt_tokens[rows].astype(np.int64) + self.table.own_tokens[rows]
        return StepPlan(
            cursor=Cursor(self.epoch, step),
            rows=rows,
            own=self._deal(own_lengths),
            pairs=pairs,
            paired_rows=trees,
            mismatched=self._deal(lengths),
        )

    def _deal(self, lengths: NDArray[np.int64]) -> Deal:
        settings = self.settings
        return deal(
            lengths,
            world_size=settings.world.size,
            budget=settings.tokens_per_batch,
            pads=settings.pads,
        )

    def _pairs(self, step: int, rows: NDArray[np.int64]) -> Pairs:
        levels = self._levels()
        counts = self.table.num_branches(rows)
        per_row = counts * len(levels)
        owner = np.repeat(np.arange(len(rows)), per_row)
        within = joined_ranges(np.zeros(len(rows), dtype=np.int64), per_row)
        every = Pairs(owner, within % counts[owner], levels[within // counts[owner]])
        most = self.settings.kl_per_step
        if not most or len(every) <= most:
            return every
        numbers = np.arange(len(every), dtype=np.int64)
        return every.take(np.sort(shuffled(numbers, key_of("pairs", self.key, step))[:most]))

    def _levels(self) -> NDArray[np.int64]:
        count = self.table.levels
        if count and self.settings.kl_use == "rotate":
            return np.array([self.epoch % count])
        return np.arange(count)


def training_pass(table: RowTable, settings: FeedSettings, *, epoch: int) -> Pass:
    """One epoch."""
    order = shuffled_order(table.group_offsets, seed=settings.seed, epoch=epoch)
    steps = num_steps(len(table), settings.batch_size, settings.limit_train_batches)
    key = key_of("epoch", settings.seed, epoch)
    return Pass(table, order, settings, epoch, steps, key)


def evaluation_pass(table: RowTable, settings: FeedSettings) -> Pass:
    """Every row once, in the same order and with all of the same partners each time."""
    steps = num_steps(len(table), settings.batch_size, settings.limit_eval_batches)
    order, every = stored_order(table.group_offsets), replace(settings, kl_per_step=0)
    return Pass(table, order, every, epoch=0, num_steps=steps, key=key_of("evaluation"))


def num_steps(rows: int, batch_size: int, limit: int) -> int:
    """Steps it takes; the last one may hold fewer rows, and none is repeated to fill it."""
    steps = -(-rows // batch_size)
    return min(steps, limit) if limit else steps
