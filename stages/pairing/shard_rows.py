"""The rows of a shard, ready to be scored: each completion with its KL partners, cut to fit.

Partners come from the shard's own key range. A range of few prompts borrows those after it, round
the end, and so does a search for another text or for one that fits after a cut: always the same
ranges, whoever makes the shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...schemas.columns import Ragged
from ...schemas.row_keys import KeyedRows
from ...schemas.rows import Rejected, Role, RowBlock
from .kl_partners import NONE, choose_partners, fill, runs_of

LEAST_PROMPTS = 64  # of a range that borrows no other
MOST_BORROWED = 65_536  # candidates, beyond which no range is borrowed for want of prompts or texts
MOST_SEARCHED = 4096  # candidates looked at for one that fits after cutting
SEARCH_WINDOW = 256  # of these, looked at together

Read = Callable[[int, Counter[str]], KeyedRows | None]


@dataclass(frozen=True)
class CutRule:
    """Rule for cutting a KL completion to fit its prompt."""

    max_length: int
    stops: frozenset[int]  # the tokens that what was cut never ends with


@dataclass(frozen=True)
class ShardRows:
    """The rows of one shard before they are scored."""

    rows: RowBlock  # own completions first, then the KL completions, k by k
    first_key: str
    last_key: str
    rejected: tuple[Rejected, ...]
    notes: Counter[str]


def build_shard(read: Read, shard: int, shards: int, num_pairs: int, rule: CutRule) -> ShardRows:
    """Reads the rows of a shard, which has some, and gives each completion its KL partners."""
    notes = Counter[str]()
    own = read(shard, notes)
    assert own is not None, "a shard without rows is not built"
    ring = _Candidates(own, read, shard, shards)
    chosen = _paired(ring, num_pairs, notes).reshape(-1)
    numbers, fitted, missing = _fitted_partners(ring, chosen, rule)
    is_replaced = (numbers != chosen) & (chosen != NONE)
    notes["mismatched_completions_replaced_after_cutting"] += int(is_replaced.sum())
    # Each row's own completions, then all first partners, then all second ones, ...
    count = len(own.rows.completions)
    branch_rows = np.tile(own.rows.row_of_branch, 1 + num_pairs)
    k = np.repeat(np.arange(1 + num_pairs), count)
    order = np.lexsort((np.arange(len(branch_rows)), k, branch_rows))
    added = fitted.brought_along()
    added["roles"] = np.full_like(fitted.roles, Role.MISMATCHED)
    rows = own.rows.with_branches(order, own.rows.branch_offsets * (1 + num_pairs), **added)
    if missing:
        rows = rows.take(np.setdiff1d(np.arange(len(rows)), list(missing)))
    rejected = [
        Rejected(int(own.rows.file[row]), int(own.rows.row[row]), "no_mismatch", why)
        for row, why in sorted(missing.items())
    ]
    keys = own.keys
    return ShardRows(rows, f"{keys[0]:016x}", f"{keys[-1]:016x}", tuple(rejected), notes)


class _Candidates:
    """The completions of a shard's own rows, and behind them those of borrowed ranges."""

    def __init__(self, own: KeyedRows, read: Read, shard: int, shards: int) -> None:
        self.own, self._read = own, read
        self._later = iter([(shard + step) % shards for step in range(1, shards)])
        self._hold(own)

    def _hold(self, keyed: KeyedRows) -> None:
        self._keyed, rows = keyed, keyed.rows
        self._row_of = rows.row_of_branch
        self._no_prompts = rows.with_heads("prompts", np.zeros(len(rows), np.int64))
        self.prompts, self.texts = keyed.keys[self._row_of], keyed.completion_keys

    def borrow(self) -> bool:
        """Adds the completions of the next range that has rows; False if there is none."""
        for shard in self._later:
            if more := self._read(shard, Counter()):
                self._hold(KeyedRows.concat([self._keyed, more]))
                return True
        return False

    def at(self, completions: NDArray[np.int64]) -> RowBlock:
        """A row for each of these completions, in that order: with it alone, and no prompt."""
        return self._no_prompts.gather(
            self._row_of[completions], completions, np.arange(len(completions) + 1)
        )


def _paired(ring: _Candidates, num_pairs: int, notes: Counter[str]) -> NDArray[np.int64]:
    """The partners of each own completion, k by k; NONE where no text of another prompt is near."""
    own = len(ring.prompts)
    while num_pairs and _has_few_prompts(ring) and ring.borrow():
        pass
    chosen = choose_partners(ring.prompts, ring.texts, own, num_pairs)
    while (chosen == NONE).any() and len(ring.texts) < MOST_BORROWED and ring.borrow():
        for k, partners in enumerate(chosen):
            fill(partners, ring.prompts, ring.texts, k)
    for k, partners in enumerate(chosen):
        uses = np.bincount(partners[partners != NONE], minlength=1)
        is_met_again = ((chosen[:k] == partners) & (partners != NONE)).any(axis=0)
        notes["mismatched_completions_used_twice"] += int(np.maximum(uses - 1, 0).sum())
        notes["mismatched_completions_met_again_by_the_same_row"] += int(is_met_again.sum())
    return chosen


def _has_few_prompts(ring: _Candidates) -> bool:
    lengths = np.diff(runs_of(ring.prompts))
    has_room = len(ring.prompts) < MOST_BORROWED or 2 * int(lengths.max()) > len(ring.prompts)
    return len(lengths) < LEAST_PROMPTS and has_room


def _fitted_partners(
    ring: _Candidates, chosen: NDArray[np.int64], rule: CutRule
) -> tuple[NDArray[np.int64], RowBlock, dict[int, str]]:
    """The partners, cut to fit, as rows of one completion; and why rows have none.

    Where cutting leaves nothing, or the real completion, the next candidate that fits is taken.
    """
    own, count = ring.own.rows, len(ring.own.rows.completions)
    row_of = own.row_of_branch
    space = rule.max_length - own.prompts.lengths[row_of]
    alone = np.unique(row_of[np.flatnonzero(chosen == NONE) % count]) if count else ()
    missing = {int(row): "no completion of another prompt with another text" for row in alone}
    numbers = np.maximum(chosen, 0)
    fitted = _cut(ring.at(numbers), np.resize(space, len(numbers)), rule.stops)
    for index in _alike(own.completions, fitted).tolist():
        branch = index % count
        row = int(row_of[branch])
        if row in missing:
            continue
        found = _next_fitting(ring, int(numbers[index]), branch, int(space[branch]), rule.stops)
        if found is not None:
            numbers[index] = found
        else:
            missing[row] = (
                f"room for {space[branch]} tokens behind the prompt: cut to that, none of the "
                f"{min(MOST_SEARCHED, len(ring.texts) - 1)} completions after its partner is of "
                "another prompt and another text than completion "
                f"{branch - int(own.branch_offsets[row])}; raise max_length or set kl_pairs to 0"
            )
    if (numbers != chosen).any():
        fitted = _cut(ring.at(numbers), np.resize(space, len(numbers)), rule.stops)
    return numbers, fitted, missing


def _cut(rows: RowBlock, space: NDArray[np.int64], stops: frozenset[int]) -> RowBlock:
    """Cuts to the space behind each prompt; a cut completion never ends with a stop token."""
    ids = rows.completions
    limits = np.minimum(ids.lengths, space)
    if stops:
        for index in np.flatnonzero(limits < ids.lengths).tolist():
            while limits[index] and int(ids[index][limits[index] - 1]) in stops:
                limits[index] -= 1
    lost = (ids.lengths - limits).astype(np.int32)
    return replace(rows.with_heads("completions", limits), cut=rows.cut + lost)


def _alike(own: Ragged, fitted: RowBlock) -> NDArray[np.int64]:
    """Partners of which cutting has left nothing to learn, or that equal the real completion."""
    ids, is_nothing = fitted.completions, fitted.num_learned == 0
    suspects = np.flatnonzero((ids.lengths == np.resize(own.lengths, len(ids))) | is_nothing)
    alike = [
        index
        for index in suspects.tolist()
        if is_nothing[index] or not _differs(ids[index], own[index % len(own)])
    ]
    return np.array(alike, dtype=np.int64)


def _differs(ids: NDArray[np.int32], completion: NDArray[np.int32]) -> bool:
    return len(ids) > 0 and not np.array_equal(ids, completion)


def _next_fitting(
    ring: _Candidates, partner: int, branch: int, space: int, stops: frozenset[int]
) -> int | None:
    """The next candidate after a partner with another prompt and, cut, another text.

    Round the end of the candidates first, then in ranges behind them.
    """
    completion, prompt = ring.own.rows.completions[branch], ring.prompts[branch]
    total, looked = len(ring.prompts), 0
    order = (partner + np.arange(1, total)) % total
    while True:
        for first in range(0, min(len(order), MOST_SEARCHED - looked), SEARCH_WINDOW):
            near = order[first : min(first + SEARCH_WINDOW, MOST_SEARCHED - looked)]
            fitted = _cut(ring.at(near), np.full(len(near), space), stops)
            fits = np.array([_differs(each, completion) for each in fitted.completions])
            fits &= (fitted.num_learned > 0) & (ring.prompts[near] != prompt)
            if fits.any():
                return int(near[fits.argmax()])
        looked += len(order)
        if looked >= MOST_SEARCHED or not ring.borrow():
            return None
        order = np.arange(total, len(ring.prompts))
        total = len(ring.prompts)
