"""The rows of a shard, ready to be scored: each completion with its KL completions, cut to fit.

KL completions come from the shard's own key range. A range with few prompts, or too few texts that
fit, borrows the ranges after it, wrapping around. The borrowed ranges depend on the data alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.columns import arrow_of, offsets_of
from ...schemas.row_table import Rows, fitted_length
from ...schemas.rows import Rejected, Role
from .kl_partners import NONE, choose_partners, fill, runs_of

LEAST_PROMPTS = 64  # a range with fewer borrows others
MOST_BORROWED = 65_536  # a pool of so many completions borrows no more for prompts or texts
MOST_SEARCHED = 4096  # completions that are tried to find one that fits after cutting
SEARCH_WINDOW = 256  # completions that are tried at a time

Read = Callable[[int, Counter[str]], Rows | None]


@dataclass(frozen=True)
class ShardRows:
    """The rows of one shard before they are scored."""

    rows: Rows  # own completions first, then their KL completions, k by k
    first_key: str
    last_key: str
    rejected: tuple[Rejected, ...]
    notes: Counter[str]


def build_shard(
    read: Read, shard: int, shards: int, num_pairs: int, *, max_length: int, stops: frozenset[int]
) -> ShardRows:
    """Reads the rows of a shard that is not empty, and adds their KL completions."""
    notes = Counter[str]()
    own = read(shard, notes)
    assert own is not None, "a shard without rows is not built"
    pool = _Pool(own, read, [(shard + step) % shards for step in range(1, shards)], stops)
    chosen = _paired(pool, num_pairs, notes).reshape(-1)
    numbers, limits, missing = _fitting(pool, chosen, max_length)
    is_replaced = (numbers != chosen) & (chosen != NONE)
    notes["mismatched_completions_replaced_after_cutting"] += int(is_replaced.sum())
    # Each row's own completions, then all first partners, then all second ones, ...
    count = len(own.completions)
    completion_rows = np.tile(own.row_of_completion, 1 + num_pairs)
    k = np.repeat(np.arange(1 + num_pairs), count)
    order = np.lexsort((np.arange(len(completion_rows)), k, completion_rows))
    is_partner, taken = order >= count, np.append(np.arange(count), numbers)[order]
    completions = pool.rows.of_completions.take(arrow_of(taken, pa.int64()))
    rows = Rows(own.of_rows, completions, own.completion_offsets * (1 + num_pairs))
    rows = rows.without("completion_key").with_columns(
        role=np.where(is_partner, Role.MISMATCHED, rows.roles),
        score=np.where(is_partner, np.nan, rows.scores),  # scores are of the original prompt
    )
    kept = np.append(own.completions.lengths, limits)[order]
    if (lost := rows.completions.lengths - kept).any():
        learned = {} if rows.learned is None else {"completion_turns": rows.learned.head(kept)}
        ids = rows.completions.head(kept)
        rows = rows.with_columns(completion_ids=ids, cut=rows.cut + lost, **learned)
    if missing:
        rows = rows.take(np.setdiff1d(np.arange(len(rows)), list(missing)))
    rejected = [
        Rejected(int(own.file[row]), int(own.row[row]), "no_mismatch", why)
        for row, why in sorted(missing.items())
    ]
    first_key, last_key = (f"{key:016x}" for key in own.range_keys[[0, -1]].tolist())
    return ShardRows(rows, first_key, last_key, tuple(rejected), notes)


class _Pool:
    """The possible KL completions: the shard's completions, then borrowed ones."""

    def __init__(self, own: Rows, read: Read, later: list[int], stops: frozenset[int]) -> None:
        self.own, self._read, self._later, self._stops = own, read, iter(later), stops
        self._hold(own)

    def _hold(self, rows: Rows) -> None:
        self.rows, self.ids = rows, rows.completions
        self.prompts, self.texts = rows.range_keys[rows.row_of_completion], rows.completion_key
        # The number of learned tokens before each token of all completions.
        self._learned = None if rows.learned is None else offsets_of(rows.learned.values > 0)

    def borrow(self) -> bool:
        """Adds the completions of the next range that has rows; False if there is none."""
        for shard in self._later:
            if more := self._read(shard, Counter()):
                self._hold(Rows.concat([self.rows, more]))
                return True
        return False

    def fitted(
        self, numbers: NDArray[np.int64], room: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The number of tokens of these completions that fit, and whether any is learned."""
        whole = self.ids.lengths[numbers]
        lengths = np.minimum(whole, room)
        for index in np.flatnonzero(lengths < whole).tolist() if self._stops else ():
            ids = self.ids[numbers[index]]
            lengths[index] = fitted_length(ids, int(lengths[index]), self._stops)
        if self._learned is None:
            return lengths, lengths > 0
        starts = self.ids.offsets[numbers]
        return lengths, self._learned[starts + lengths] > self._learned[starts]


def _paired(pool: _Pool, num_pairs: int, notes: Counter[str]) -> NDArray[np.int64]:
    """Partner k of each own completion, k by k; NONE where no text of another prompt fits."""
    own = len(pool.prompts)
    while num_pairs and _has_few_prompts(pool) and pool.borrow():
        pass
    chosen = choose_partners(pool.prompts, pool.texts, own, num_pairs)
    while (chosen == NONE).any() and len(pool.texts) < MOST_BORROWED and pool.borrow():
        for k, partners in enumerate(chosen):
            fill(partners, pool.prompts, pool.texts, k)
    for k, partners in enumerate(chosen):
        uses = np.bincount(partners[partners != NONE], minlength=1)
        is_met_again = ((chosen[:k] == partners) & (partners != NONE)).any(axis=0)
        notes["mismatched_completions_used_twice"] += int(np.maximum(uses - 1, 0).sum())
        notes["mismatched_completions_met_again_by_the_same_row"] += int(is_met_again.sum())
    return chosen


def _has_few_prompts(pool: _Pool) -> bool:
    lengths = np.diff(runs_of(pool.prompts))
    has_room = len(pool.prompts) < MOST_BORROWED or 2 * int(lengths.max()) > len(pool.prompts)
    return len(lengths) < LEAST_PROMPTS and has_room


def _fitting(
    pool: _Pool, chosen: NDArray[np.int64], max_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[int, str]]:
    """The partners, the number of their tokens that fit, and the reasons for rows without one.

    If cutting leaves nothing to learn, or the row's own text, the next partner that fits is used.
    """
    own, count = pool.own, len(pool.own.completions)
    row_of = own.row_of_completion
    room = max_length - own.prompts.lengths[row_of]
    alone = np.unique(row_of[np.flatnonzero(chosen == NONE) % count]) if count else ()
    missing = {int(row): "no completion of another prompt with another text" for row in alone}
    numbers = np.maximum(chosen, 0)
    lengths, has_learned = pool.fitted(numbers, np.resize(room, len(numbers)))
    is_as_long = lengths == np.resize(own.completions.lengths, len(numbers))
    for index in np.flatnonzero(is_as_long | ~has_learned).tolist():
        completion = index % count
        row = int(row_of[completion])
        ids = pool.ids[numbers[index]][: lengths[index]]
        is_same = np.array_equal(ids, own.completions[completion])
        if row in missing or not (is_same or not has_learned[index]):
            continue
        found = _next_fitting(pool, int(numbers[index]), completion, int(room[completion]))
        if found is not None:
            numbers[index], lengths[index] = found
        else:
            missing[row] = (
                f"room for {room[completion]} tokens after the prompt: cut to that, none of the "
                f"{min(MOST_SEARCHED, len(pool.texts) - 1)} completions that were tried differs in "
                f"prompt and text from completion {completion - int(own.completion_offsets[row])}; "
                "raise max_length or set kl_pairs to 0"
            )
    return numbers, lengths, missing


def _next_fitting(pool: _Pool, partner: int, completion: int, room: int) -> tuple[int, int] | None:
    """The next completion with another prompt and, when cut, another text; its number of tokens.

    The search wraps around the pool, then borrows more ranges.
    """
    own_ids, prompt = pool.own.completions[completion], pool.prompts[completion]
    total, looked = len(pool.prompts), 0
    order = (partner + np.arange(1, total)) % total
    while True:
        for first in range(0, min(len(order), MOST_SEARCHED - looked), SEARCH_WINDOW):
            near = order[first : min(first + SEARCH_WINDOW, MOST_SEARCHED - looked)]
            lengths, has_learned = pool.fitted(near, np.full(len(near), room))
            for at in np.flatnonzero(has_learned & (pool.prompts[near] != prompt)).tolist():
                ids = pool.ids[near[at]][: lengths[at]]
                if not np.array_equal(ids, own_ids):
                    return int(near[at]), int(lengths[at])
        looked += len(order)
        if looked >= MOST_SEARCHED or not pool.borrow():
            return None
        order = np.arange(total, len(pool.prompts))
        total = len(pool.prompts)
