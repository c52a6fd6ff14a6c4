"""Fitted partners: cut to the space behind the prompts that they come under, or replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...schemas.columns import Ragged
from ...schemas.row_keys import KeyedRows
from ...schemas.rows import RowBlock
from ..sort.sorted_rows import SortedRows
from .kl_partners import first_after

MOST_SEARCHED = 4096  # completions looked at for one whose text is another after cutting


@dataclass(frozen=True)
class CutRule:
    """Rule for cutting a mismatched completion to fit its prompt."""

    max_length: int
    stops: frozenset[int]  # the tokens that what was cut never ends with


@dataclass(frozen=True)
class FittedPartners:
    """The partners of some completions, k by k, cut to fit behind the prompts they come under."""

    numbers: NDArray[np.int64]
    rows: RowBlock  # each with one partner alone
    missing: Mapping[int, str]  # rows that have none, and why


def fit_partners(
    ring: SortedRows, keyed: KeyedRows, chosen: NDArray[np.int64], rule: CutRule
) -> FittedPartners:
    """Cuts the chosen partners to fit.

    Where that leaves nothing, or the real completion, the next on the ring that fits is taken.
    """
    own, count = keyed.rows, len(keyed.rows.completions)
    row_of = own.row_of_branch
    space = rule.max_length - own.prompts.lengths[row_of]
    numbers, missing = chosen.copy(), dict[int, str]()
    fitted = _fitted(ring.at(numbers).rows, np.resize(space, len(numbers)), rule.stops)
    for index in _alike(own.completions, fitted).tolist():
        branch = index % count
        row = int(row_of[branch])
        search = _Search(
            ring_key=keyed.ring_keys[row],
            completion=own.completions[branch],
            space=int(space[branch]),
            stops=rule.stops,
        )
        found = search.after(int(numbers[index]), ring)
        if found is not None:
            numbers[index] = found
        elif row not in missing:
            missing[row] = search.failure(branch - int(own.branch_offsets[row]), ring)
    if (numbers != chosen).any():
        fitted = _fitted(ring.at(numbers).rows, np.resize(space, len(numbers)), rule.stops)
    return FittedPartners(numbers, fitted, missing)


def _fitted(rows: RowBlock, space: NDArray[np.int64], stops: frozenset[int]) -> RowBlock:
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


@dataclass(frozen=True)
class _Search:
    """Searches another partner for a completion whose own equals it after cutting."""

    ring_key: np.uint64  # of the prompt
    completion: NDArray[np.int32]
    space: int  # tokens behind the prompt
    stops: frozenset[int]

    def after(self, partner: int, ring: SortedRows) -> int | None:
        """The next on the ring with another prompt and, after cutting, another text."""

        def fits(near: NDArray[np.int64]) -> NDArray[np.bool_]:
            found = ring.at(near)
            fitted = _fitted(found.rows, np.full(len(near), self.space), self.stops)
            differs = np.array([_differs(each, self.completion) for each in fitted.completions])
            differs &= fitted.num_learned > 0
            another: NDArray[np.bool_] = differs & (found.ring_keys != self.ring_key)
            return another

        return first_after(partner, ring.num_completions, fits, most=MOST_SEARCHED)

    def failure(self, number: int, ring: SortedRows) -> str:
        """Why the row is rejected."""
        return (
            f"room for {self.space} tokens behind the prompt: cut to that, none of the "
            f"{min(MOST_SEARCHED, ring.num_completions - 1)} completions after its partner is "
            f"of another prompt and another text than completion {number}; "
            "raise max_length or set kl_pairs to 0"
        )
