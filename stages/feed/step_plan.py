"""The plan of one step: its rows and KL completions, and their ranks and micro-batches.

Every rank gets the same number of micro-batches and runs the largest first, empty ones last, so
that all ranks reach a collective call at about the same time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ...schemas.batches import StepSize, World
from ...schemas.columns import joined_ranges
from .epoch_order import Order, key_of, shuffled, shuffled_order, stored_order

if TYPE_CHECKING:
    from .cache_index import RowSizes, RowTable


@dataclass(frozen=True)
class FeedSettings:
    """The settings that divide a source into steps; the last three change no result."""

    seed: int
    epochs: float
    batch_size: int  # rows per step, over all ranks
    kl_use: Literal["rotate", "all"]  # partners in use: one per epoch in turn, or all
    kl_per_step: int  # most KL completions in a step; 0: no limit
    limit_eval_batches: int  # most steps of an evaluation; 0: no limit
    tokens_per_batch: int  # most tokens in a micro-batch
    pads: bool  # whether a micro-batch is padded to its longest row
    world: World


@dataclass(frozen=True)
class MismatchedPairs:
    """The KL completions of a step, in step order: by row, then by partner."""

    rows: NDArray[np.int64]  # (pairs,) indices of their rows in the step
    completions: NDArray[np.int64]  # (pairs,) index of the own completion in its row
    partners: NDArray[np.int64]  # (pairs,) index among that completion's partners

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: NDArray[np.int64]) -> MismatchedPairs:
        """The pairs at `indices`, in that order."""
        return MismatchedPairs(
            self.rows[indices], self.completions[indices], self.partners[indices]
        )

    def tokens(self, sizes: RowSizes, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tokens of each completion; `rows` are the row numbers of the step."""
        completions = sizes.completion_offsets[rows[self.rows]] + self.completions
        tokens: NDArray[np.int32] = sizes.mismatched_tokens[completions, self.partners]
        return tokens


@dataclass(frozen=True)
class StepPlan:
    """One step over all ranks; its rows do not depend on the world size or token budget."""

    step: int  # index in its pass
    rows: NDArray[np.int64]  # (rows,) row numbers in step order
    own: BatchAssignment  # of these rows
    pairs: MismatchedPairs
    paired_rows: NDArray[np.int64]  # (trees,) indices in the step of the rows that have pairs
    mismatched: BatchAssignment  # of these trees

    def rows_of_rank(self, rank: int) -> NDArray[np.int64]:
        """The numbers of the rows that a rank reads."""
        own = np.flatnonzero(self.own.ranks == rank)
        mismatched = self.paired_rows[self.mismatched.ranks == rank]
        numbers: NDArray[np.int64] = self.rows[np.union1d(own, mismatched)]
        return numbers


@dataclass(frozen=True)
class Pass:
    """One pass over the rows of a table: an epoch, or an evaluation."""

    table: RowTable
    order: Order
    settings: FeedSettings
    epoch: int
    num_steps: int
    key: int  # draws KL completions if a step has too many

    def end(self, step: int) -> int:
        """The end of a step: one past the position of its last row."""
        return min((step + 1) * self.settings.batch_size, len(self.order))

    def size(self) -> StepSize:
        """The total size of all its steps."""
        return self.table.size_of(self.order.rows(0, self.end(self.num_steps - 1)))

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
        sizes = self.table.sizes
        lengths = sizes.prompt_tokens[rows[trees]].astype(np.int64)
        np.add.at(lengths, tree_of_pair, pairs.tokens(sizes, rows))
        own_lengths = sizes.tokens(rows)
        return StepPlan(
            step=step,
            rows=rows,
            own=self._assign(own_lengths),
            pairs=pairs,
            paired_rows=trees,
            mismatched=self._assign(lengths),
        )

    def _assign(self, lengths: NDArray[np.int64]) -> BatchAssignment:
        settings = self.settings
        return assign_batches(
            lengths,
            world_size=settings.world.size,
            budget=settings.tokens_per_batch,
            pads=settings.pads,
        )

    def _pairs(self, step: int, rows: NDArray[np.int64]) -> MismatchedPairs:
        partners = self._partners()
        counts = self.table.num_completions(rows)
        per_row = counts * len(partners)
        owner = np.repeat(np.arange(len(rows)), per_row)
        within = joined_ranges(np.zeros(len(rows), dtype=np.int64), per_row)
        every = MismatchedPairs(owner, within % counts[owner], partners[within // counts[owner]])
        most = self.settings.kl_per_step
        if not most or len(every) <= most:
            return every
        numbers = np.arange(len(every), dtype=np.int64)
        return every.take(np.sort(shuffled(numbers, key_of("pairs", self.key, step))[:most]))

    def _partners(self) -> NDArray[np.int64]:
        """The indices of the partners that this pass uses."""
        count = self.table.num_partners
        if count and self.settings.kl_use == "rotate":
            return np.array([self.epoch % count])
        return np.arange(count)


def training_pass(table: RowTable, settings: FeedSettings, *, epoch: int) -> Pass:
    """The pass over training rows of one epoch."""
    seed, draws = settings.seed, table.draws
    times = None if draws is None else draws.times(seed=seed, epoch=epoch)
    order = shuffled_order(table.group_offsets, seed=seed, epoch=epoch, times=times)
    steps = num_steps(table.rows_per_epoch, settings.batch_size)
    key = key_of("epoch", settings.seed, epoch)
    return Pass(table, order, settings, epoch, steps, key)


def evaluation_pass(table: RowTable, settings: FeedSettings) -> Pass:
    """The pass of an evaluation: every row once, with the same order and partners each time."""
    steps = num_steps(len(table), settings.batch_size, settings.limit_eval_batches)
    order, every = stored_order(table.group_offsets), replace(settings, kl_per_step=0)
    return Pass(table, order, every, epoch=0, num_steps=steps, key=key_of("evaluation"))


def num_steps(rows: int, batch_size: int, limit: int = 0) -> int:
    """The number of steps; the last one may have fewer rows, and no row is repeated."""
    steps = -(-rows // batch_size)
    return min(steps, limit) if limit else steps


def steps_in(epochs: float, steps_per_epoch: int) -> int:
    """The steps of so many epochs, rounded up to whole steps.

    Computed in decimals: as a binary fraction, 0.1 of 30 steps is more than 3.
    """
    return math.ceil(Fraction(repr(epochs)) * steps_per_epoch)


def rows_seen(steps: int, rows: int, batch_size: int) -> int:
    """The number of rows in so many steps, over all epochs; an epoch's last step may have fewer."""
    epochs, more = divmod(steps, num_steps(rows, batch_size))
    return epochs * rows + more * batch_size


@dataclass(frozen=True)
class BatchAssignment:
    """The rank and micro-batch of each sequence."""

    ranks: NDArray[np.int64]  # (sequences,)
    turns: NDArray[np.int64]  # (sequences,) index of the micro-batch on the rank
    num_turns: int  # micro-batches of every rank

    def of_rank(self, rank: int) -> list[NDArray[np.int64]]:
        """The sequences of each micro-batch of a rank, in ascending order."""
        mine = np.flatnonzero(self.ranks == rank)
        return [mine[self.turns[mine] == turn] for turn in range(self.num_turns)]


def assign_batches(
    lengths: NDArray[np.int64], *, world_size: int, budget: int, pads: bool
) -> BatchAssignment:
    """An assignment whose micro-batches have at most `budget` tokens, or a single sequence.

    With `pads` the tokens of a micro-batch are its longest sequence times their number.
    """
    if not len(lengths):
        none = np.empty(0, dtype=np.int64)
        return BatchAssignment(none, none, 0)
    bins = (_alike if pads else _even)(lengths, world_size, budget)
    loads = np.zeros(bins.count, dtype=np.int64)
    if pads:
        np.maximum.at(loads, bins.of, lengths)
        loads *= np.bincount(bins.of, minlength=len(loads))
    else:
        np.add.at(loads, bins.of, lengths)
    ranks, turns = _rounds(loads, world_size)
    return BatchAssignment(ranks[bins.of], turns[bins.of], bins.count // world_size)


@dataclass(frozen=True)
class _Bins:
    of: NDArray[np.int64]  # (sequences,)
    count: int  # a multiple of the world's size; some may be empty


def _even(lengths: NDArray[np.int64], world_size: int, budget: int) -> _Bins:
    """The fewest bins within the budget; the longest sequence goes first, into the emptiest bin."""
    order = np.argsort(-lengths, kind="stable").tolist()
    filled = int(np.minimum(lengths, budget).sum())
    alone = int((2 * lengths > budget).sum())
    turns, more = max(-(-filled // (budget * world_size)), -(-alone // world_size)), 1
    while (of := _into_emptiest(lengths, order, turns * world_size, budget)) is None:
        turns, more = min(turns + more, -(-len(lengths) // world_size)), 2 * more
    return _Bins(of, turns * world_size)


def _into_emptiest(
    lengths: NDArray[np.int64], order: list[int], count: int, budget: int
) -> NDArray[np.int64] | None:
    """The bin of each sequence; None if one does not fit."""
    heap = [(0, number) for number in range(count)]
    of = np.empty(len(lengths), dtype=np.int64)
    sizes = lengths.tolist()
    for sequence in order:
        load, number = heap[0]
        if load and load + sizes[sequence] > budget:
            return None
        of[sequence] = number
        heapq.heapreplace(heap, (load + sizes[sequence], number))
    return of


def _alike(lengths: NDArray[np.int64], world_size: int, budget: int) -> _Bins:
    """Bins of sequences of similar length, with the smallest budget that needs no more turns."""
    order = np.argsort(-lengths, kind="stable")
    sizes = lengths[order].tolist()
    turns = -(-len(_starts(sizes, budget)) // world_size)
    least, most = 1, budget
    while least < most:
        middle = (least + most) // 2
        if len(_starts(sizes, middle)) <= turns * world_size:
            most = middle
        else:
            least = middle + 1
    starts = _starts(sizes, most)
    of = np.empty(len(lengths), dtype=np.int64)
    of[order] = np.repeat(np.arange(len(starts)), np.diff([*starts, len(sizes)]))
    return _Bins(of, turns * world_size)


def _starts(sizes: list[int], budget: int) -> list[int]:
    """The start of each bin in a descending list of sizes, filled greedily."""
    starts = []
    start = 0
    while start < len(sizes):
        starts.append(start)
        start += max(1, budget // sizes[start])
    return starts


def _rounds(
    loads: NDArray[np.int64], world_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rank and turn of each bin: in each turn the least loaded rank gets the largest bin."""
    order = np.argsort(-loads, kind="stable")
    ranks, turns = np.empty_like(order), np.empty_like(order)
    so_far = np.zeros(world_size, dtype=np.int64)
    for turn, bins in enumerate(order.reshape(-1, world_size)):
        takers = np.argsort(so_far, kind="stable")
        ranks[bins], turns[bins] = takers, turn
        so_far[takers] += loads[bins]
    return ranks, turns
