"""Cuts the ring into units, and adds the mismatched branches to their rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...schemas.row_keys import KeyedRows
from ...schemas.rows import Ragged, Rejected, Role, RowBlock
from .ring import Ring
from .spool import Spool

MOST_SEARCHED = 4096  # completions looked at for one whose text is another after cutting
SEARCH_WINDOW = 256  # of them read together


@dataclass(frozen=True)
class Unit:
    """Rows of one key range of the ring, ready to be scored."""

    rows: RowBlock  # own branches first, then the mismatched ones, k by k
    first_key: str
    last_key: str
    rejected: tuple[Rejected, ...]
    replaced: int  # partners that cutting had made alike, and others stand in for


@dataclass(frozen=True)
class CutRule:
    """How a mismatched completion is cut to fit its prompt."""

    max_length: int
    stops: frozenset[int]  # the tokens that what was cut never ends with


def unit_offsets(
    spool: Spool, *, num_pairs: int, rows_per_unit: int, tokens_per_unit: int
) -> tuple[int, ...]:
    """Row numbers where units begin, and the end; set by the rows alone."""
    offsets, held = [0], 0
    for first, last, branches in spool.stretches():
        prompts = spool.offsets("prompt_ends", first, last)
        completions = spool.offsets("completion_ends", int(branches[0]), int(branches[-1]))
        # Tokens up to each row; how long mismatched completions are is estimated by its own.
        ends = prompts + (1 + num_pairs) * completions[branches - branches[0]]
        place = first
        while place < last:
            start = offsets[-1]
            before = int(ends[place - first])
            fit = np.searchsorted(ends[1:], before + tokens_per_unit - held, side="right")
            stop = min(first + int(fit), start + rows_per_unit, last)
            if place == start:
                stop = max(stop, start + 1)  # however long it is
            held += int(ends[stop - first]) - before
            if stop < last:
                offsets.append(stop)
                held = 0
            place = stop
    return tuple(offsets if offsets[-1] == len(spool) else [*offsets, len(spool)])


def build_unit(ring: Ring, start: int, stop: int, rule: CutRule) -> Unit:
    """Reads rows `start` to `stop` and gives each completion its mismatched partners."""
    keyed = ring.spool.read(start, stop)
    own = keyed.rows
    first = int(ring.spool.offsets("branch_ends", start, start)[0])
    chosen = ring.partners(first, first + len(own.completions)).reshape(-1)
    partners = chosen.copy()
    fitted = _fit_partners(ring, own, partners, rule)
    rejected: dict[int, Rejected] = {}
    if len(alike := _alike(own, fitted.completions)):
        rejected = _replace_partners(ring, keyed, partners, alike, rule)
        fitted = _fit_partners(ring, own, partners, rule)
    rows = _with_mismatched(own, fitted, ring.num_pairs)
    if rejected:
        rows = rows.take(np.setdiff1d(np.arange(len(own)), list(rejected)))
    return Unit(
        rows=rows,
        first_key=f"{int(keyed.places[0]):016x}",
        last_key=f"{int(keyed.places[-1]):016x}",
        rejected=tuple(rejected[row] for row in sorted(rejected)),
        replaced=int((partners != chosen).sum()),
    )


@dataclass(frozen=True)
class _Mismatched:
    """The partners of all completions as they are after cutting, k by k."""

    completions: Ragged
    cut: NDArray[np.int64]  # tokens each has lost in all


def _fit_partners(
    ring: Ring, own: RowBlock, partners: NDArray[np.int64], rule: CutRule
) -> _Mismatched:
    picked = ring.spool.completions(partners)
    row_of = np.tile(own.row_of_branch, ring.num_pairs)
    fitted = _fit(picked, rule.max_length - own.prompts.lengths[row_of], rule.stops)
    return _Mismatched(fitted, ring.spool.cuts(partners) + picked.lengths - fitted.lengths)


def _fit(completions: Ragged, room: NDArray[np.int64], stops: frozenset[int]) -> Ragged:
    """Cuts to the room there is; what was cut never ends with a stop."""
    limits = np.minimum(completions.lengths, room)
    if stops:
        for index in np.flatnonzero(limits < completions.lengths).tolist():
            while limits[index] and int(completions[index][limits[index] - 1]) in stops:
                limits[index] -= 1
    return completions.head(limits)


def _with_mismatched(own: RowBlock, mismatched: _Mismatched, num_pairs: int) -> RowBlock:
    """Appends to each row its mismatched branches: all of k = 1, then all of k = 2, ..."""
    count = len(own.completions)
    branch_rows = np.tile(own.row_of_branch, 1 + num_pairs)
    level = np.repeat(np.arange(1 + num_pairs), count)
    order = np.lexsort((np.arange(len(branch_rows)), level, branch_rows))
    extra = len(mismatched.completions)
    roles = np.append(own.roles, np.full(extra, Role.MISMATCHED, dtype=np.int8))
    scores = np.append(own.scores, np.full(extra, np.nan))
    return replace(
        own,
        branch_offsets=own.branch_offsets * (1 + num_pairs),
        completions=Ragged.concat([own.completions, mismatched.completions]).take(order),
        roles=roles[order],
        scores=scores[order],
        cut=np.append(own.cut, mismatched.cut.astype(np.int32))[order],
    )


def _alike(own: RowBlock, fitted: Ragged) -> NDArray[np.int64]:
    """Partners that are empty after cutting, or equal to the real completion."""
    count = len(own.completions)
    against = np.resize(own.completions.lengths, len(fitted))
    suspects = np.flatnonzero((fitted.lengths == against) | (fitted.lengths == 0))
    return np.array(
        [
            index
            for index in suspects.tolist()
            if not _differs(fitted[index], own.completions[index % count])
        ],
        dtype=np.int64,
    )


def _differs(ids: NDArray[np.int32], completion: NDArray[np.int32]) -> bool:
    return len(ids) > 0 and not np.array_equal(ids, completion)


def _replace_partners(
    ring: Ring,
    keyed: KeyedRows,
    partners: NDArray[np.int64],
    alike: NDArray[np.int64],
    rule: CutRule,
) -> dict[int, Rejected]:
    """Puts other partners in place of those at `alike`; returns the rows that have none."""
    own = keyed.rows
    row_of_branch, count = own.row_of_branch, len(own.completions)
    rejected: dict[int, Rejected] = {}
    for index in alike.tolist():
        branch = index % count
        row = int(row_of_branch[branch])
        search = _Search(
            place=int(keyed.places[row]),
            completion=own.completions[branch],
            rule=CutRule(rule.max_length - int(own.prompts.lengths[row]), rule.stops),
        )
        found = search.next_after(int(partners[index]), ring)
        if found is not None:
            partners[index] = found
        elif row not in rejected:
            place = branch - int(own.branch_offsets[row])
            rejected[row] = Rejected(
                int(own.file[row]),
                int(own.row[row]),
                "no_mismatch",
                search.failure(place, ring.spool),
            )
    return rejected


@dataclass(frozen=True)
class _Search:
    """Searches another partner for a completion whose own equals it after cutting."""

    place: int  # of the prompt on the ring
    completion: NDArray[np.int32]
    rule: CutRule  # max_length is the room behind the prompt

    def next_after(self, partner: int, ring: Ring) -> int | None:
        """The next on the ring with another prompt and, after cutting, another text."""
        total = ring.spool.num_completions
        last = min(MOST_SEARCHED, total - 1)
        for first in range(1, last + 1, SEARCH_WINDOW):
            near = (partner + np.arange(first, min(first + SEARCH_WINDOW, last + 1))) % total
            near = near[ring.places(near) != np.uint64(self.place)]
            room = np.full(len(near), self.rule.max_length)
            fitted = _fit(ring.spool.completions(near), room, self.rule.stops)
            for number, ids in zip(near.tolist(), fitted, strict=True):
                if _differs(ids, self.completion):
                    return int(number)
        return None

    def failure(self, place: int, spool: Spool) -> str:
        """Why the row is rejected."""
        return (
            f"room for {self.rule.max_length} tokens behind the prompt: cut to that, none of the "
            f"{min(MOST_SEARCHED, spool.num_completions - 1)} completions after its partner is "
            f"of another prompt and another text than completion {place}; "
            "raise max_length or set kl_pairs to 0"
        )
