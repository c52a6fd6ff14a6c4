"""Which rank runs which sequence, and in which of its micro-batches: integers in, integers out.

Every rank gets the same number of micro-batches, its empty ones last, and all ranks run their
largest first, so that those who meet in a collective come to it together.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Deal:
    """Where each sequence runs."""

    ranks: NDArray[np.int64]  # (sequences,)
    turns: NDArray[np.int64]  # (sequences,) which micro-batch of the rank
    num_turns: int  # of every rank

    def of_rank(self, rank: int) -> list[NDArray[np.int64]]:
        """The sequences of each micro-batch, ascending: their order owes nothing to the deal."""
        mine = np.flatnonzero(self.ranks == rank)
        return [mine[self.turns[mine] == turn] for turn in range(self.num_turns)]


def deal(lengths: NDArray[np.int64], *, world_size: int, budget: int, pads: bool) -> Deal:
    """No micro-batch has more than `budget` tokens, unless it is one sequence that has.

    `pads`: a micro-batch costs its longest sequence times their number, else their sum.
    """
    if not len(lengths):
        none = np.empty(0, dtype=np.int64)
        return Deal(none, none, 0)
    bins = (_alike if pads else _even)(lengths, world_size, budget)
    loads = np.zeros(bins.count, dtype=np.int64)
    if pads:
        np.maximum.at(loads, bins.of, lengths)
        loads *= np.bincount(bins.of, minlength=len(loads))
    else:
        np.add.at(loads, bins.of, lengths)
    ranks, turns = _rounds(loads, world_size)
    return Deal(ranks[bins.of], turns[bins.of], bins.count // world_size)


@dataclass(frozen=True)
class _Bins:
    of: NDArray[np.int64]  # (sequences,)
    count: int  # a multiple of the world's size; some may be empty


def _even(lengths: NDArray[np.int64], world_size: int, budget: int) -> _Bins:
    """As few bins as it takes, filled evenly: the longest first, each into the emptiest."""
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
    """The bin of each sequence; None when one does not fit."""
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
    """Sequences of like length together, under the least budget that takes no more turns."""
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
    """Where bins begin in a falling list of sizes, each as full as it goes."""
    starts = []
    start = 0
    while start < len(sizes):
        starts.append(start)
        start += max(1, budget // sizes[start])
    return starts


def _rounds(
    loads: NDArray[np.int64], world_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rank and turn of each bin: one each a round, the largest to whom has least so far."""
    order = np.argsort(-loads, kind="stable")
    ranks, turns = np.empty_like(order), np.empty_like(order)
    so_far = np.zeros(world_size, dtype=np.int64)
    for turn, bins in enumerate(order.reshape(-1, world_size)):
        takers = np.argsort(so_far, kind="stable")
        ranks[bins], turns[bins] = takers, turn
        so_far[takers] += loads[bins]
    return ranks, turns
