"""Selects the branches of stored rows that a method reads, their roles and their tokens.

`select` runs over every row group at start, on its narrow columns, and again on a row group whose
rows a step needs: of each row only its place in the row group is kept in between.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import BranchLayout, StoredKind, branch_layout
from ...schemas.columns import Ragged, joined_ranges, offsets_of
from ...schemas.rows import Role, ScoredBlock
from .conversions import CONVERSIONS, Own, Reading


@dataclass(frozen=True)
class KindCounts:
    """Counts of the stored rows of one kind, and of the rows made from them."""

    stored: int = 0
    read: int = 0  # of the stored ones
    made: int = 0  # of those: rows as the method sees them
    unscored: int = 0  # stored rows where a completion has no score
    left_out: int = 0  # completions of the rows read that no resulting row uses

    def __add__(self, other: KindCounts) -> KindCounts:
        return KindCounts(*(sum(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Selection:
    """The rows a method reads, in stored order; a stored row may be several of them, or none."""

    rows: NDArray[np.int64]  # (rows,) the stored row each is made of
    branch_offsets: NDArray[np.int64]  # (rows + 1,)
    own: NDArray[np.int64]  # (branches,) places among the stored branches; chosen first
    mismatched: NDArray[np.int64]  # (branches, levels) the k-th mismatch of each of them
    roles: NDArray[np.int8]  # (branches,) as the method reads them
    scores: NDArray[np.float64]  # (branches,) likewise
    kinds: dict[StoredKind, KindCounts]  # of those that are stored


def select(
    roles: NDArray[np.int8],
    scores: NDArray[np.float64],
    branch_offsets: NDArray[np.int64],
    *,
    reading: Reading,
    source: str,
) -> Selection:
    """Own branches lead a stored row; after them come all first mismatches, all second ones."""
    layout = branch_layout(roles, branch_offsets, source=source)
    every = _own(roles, scores, layout)
    counts = {}
    parts = [every.keep_rows(np.zeros(len(layout.kinds), dtype=np.bool_))]
    for kind in StoredKind:
        stored = every.keep_rows(layout.kinds == kind)
        convert = CONVERSIONS[reading.kind].get(kind)
        made = convert(stored, reading.rules) if convert and len(stored.rows) else parts[0]
        parts.append(made)
        if len(stored.rows):
            counts[kind] = _counted(stored, made)
    own = Own.joined(parts)
    own = own.apart() if reading.context else own
    levels = np.arange(1, layout.levels + 1)
    stride = np.repeat(layout.num_own[own.rows], own.counts)
    mismatched = own.places[:, None] + stride[:, None] * levels
    return Selection(own.rows, own.offsets, own.places, mismatched, own.roles, own.scores, counts)


def _own(roles: NDArray[np.int8], scores: NDArray[np.float64], layout: BranchLayout) -> Own:
    """All own branches as they are stored, but chosen before rejected."""
    rows = np.arange(len(layout.starts))
    places = joined_ranges(layout.starts, layout.num_own)
    is_rejected = roles[places] == Role.REJECTED
    places = places[np.lexsort((is_rejected, np.repeat(rows, layout.num_own)))]
    return Own(rows, offsets_of(layout.num_own), places, roles[places], scores[places])


def _counted(stored: Own, made: Own) -> KindCounts:
    read = np.isin(stored.rows, made.rows)
    return KindCounts(
        stored=len(stored.rows),
        read=int(read.sum()),
        made=len(made.rows),
        unscored=int((~stored.is_scored).sum()),
        left_out=int(stored.counts[read].sum()) - len(np.unique(made.places)),
    )


def as_read(
    block: ScoredBlock, rows: NDArray[np.int64], *, reading: Reading, source: str
) -> ScoredBlock:
    """The rows at `rows` among those that a method reads of a row group, laid out as stored.

    Only their own branches are in it, and the mismatches of these where any are read.
    """
    stored = block.rows
    picked = select(
        stored.roles, stored.scores, stored.branch_offsets, reading=reading, source=source
    )
    counts = np.diff(picked.branch_offsets)[rows]
    own = joined_ranges(picked.branch_offsets[rows], counts)
    levels = picked.mismatched.shape[1] if reading.mismatched else 0
    places = np.concatenate([picked.own[own], picked.mismatched[own, :levels].T.ravel()])
    row_of = np.tile(np.repeat(np.arange(len(rows)), counts), 1 + levels)
    order = np.argsort(row_of, kind="stable")
    others = np.full(levels * len(own), Role.MISMATCHED, dtype=np.int8)
    scores = np.concatenate([picked.scores[own], stored.scores[places[len(own) :]]])
    offsets = offsets_of(counts * (1 + levels))
    read = block.gather(picked.rows[rows], places[order], offsets)
    as_method = replace(
        read.rows,
        prompts=_prompts(read.rows.prompts, picked, rows, reading),
        roles=np.concatenate([picked.roles[own], others])[order],
        scores=scores[order],
    )
    return replace(read, rows=as_method)


def context_lengths(picked: Selection, reading: Reading) -> NDArray[np.int64]:
    """Tokens that are added to the prompt of each row, (rows,)."""
    lengths = np.zeros(len(picked.rows), dtype=np.int64)
    for role, tokens in reading.context.items():
        lengths[picked.roles[picked.branch_offsets[:-1]] == role] = len(tokens)
    return lengths


def _prompts(
    prompts: Ragged, picked: Selection, rows: NDArray[np.int64], reading: Reading
) -> Ragged:
    if not reading.context:
        return prompts
    roles = picked.roles[picked.branch_offsets[:-1][rows]].tolist()
    more = [np.array(reading.context[Role(role)], dtype=np.int32) for role in roles]
    return Ragged.of(
        [np.append(ids, end) for ids, end in zip(prompts, more, strict=True)], np.int32
    )
