"""Selects the branches of stored rows that a method reads, their roles and their tokens.

`select` runs over every row group at start, on its narrow columns, and again on a row group whose
rows a step needs: of each row only its index in the row group is kept in between.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import BranchLayout, StoredKind, branch_layout
from ...schemas.columns import Ragged, joined_ranges, offsets_of
from ...schemas.row_table import Rows
from ...schemas.rows import Role
from .conversions import CONVERSIONS, Own, ReadSpec
from .prompt_split import held_out


@dataclass(frozen=True)
class KindCounts:
    """Counts of the stored rows of one kind, and of the rows made from them."""

    stored: int = 0
    read: int = 0  # of the stored ones
    made: int = 0  # rows made from them, as the method reads them
    unscored: int = 0  # stored rows where a completion has no score
    left_out: int = 0  # completions of the rows read that no resulting row uses

    def __add__(self, other: KindCounts) -> KindCounts:
        return KindCounts(*(sum(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Selection:
    """The rows a method reads, in stored order; a stored row may give several of them, or none."""

    rows: NDArray[np.int64]  # (rows,) index of the stored row that each is made of
    branch_offsets: NDArray[np.int64]  # (rows + 1,)
    own: NDArray[np.int64]  # (branches,) indices of stored branches; chosen first
    mismatched: NDArray[np.int64]  # (branches, partners) indices of stored mismatched branches
    roles: NDArray[np.int8]  # (branches,) as the method reads them
    scores: NDArray[np.float64]  # (branches,) as the method reads them
    kinds: dict[StoredKind, KindCounts]  # of the stored rows


def select(
    roles: NDArray[np.int8],
    scores: NDArray[np.float64],
    branch_offsets: NDArray[np.int64],
    *,
    spec: ReadSpec,
    source: str,
    split_keys: NDArray[np.uint64],  # (stored rows,)
) -> Selection:
    """The rows that a method reads of stored ones, and their branches.

    A stored row has its own branches first, then all first mismatches, then all second ones.
    """
    layout = branch_layout(roles, branch_offsets, source=source)
    every = _own(roles, scores, layout)
    counts = {}
    parts = [every.keep_rows(np.zeros(len(layout.kinds), dtype=np.bool_))]
    for kind in StoredKind:
        stored = every.keep_rows(layout.kinds == kind)
        convert = CONVERSIONS[spec.kind].get(kind)
        made = convert(stored, spec.rules) if convert and len(stored.rows) else parts[0]
        parts.append(made)
        if len(stored.rows):
            counts[kind] = _counted(stored, made)
    own = Own.joined(parts)
    own = own if spec.label_shares.are_whole else own.keep(_by_shares(own, split_keys, spec))
    own = own.apart() if spec.context else own
    partners = np.arange(1, layout.num_partners + 1)
    stride = np.repeat(layout.num_own[own.rows], own.counts)
    mismatched = own.indices[:, None] + stride[:, None] * partners
    return Selection(own.rows, own.offsets, own.indices, mismatched, own.roles, own.scores, counts)


def _own(roles: NDArray[np.int8], scores: NDArray[np.float64], layout: BranchLayout) -> Own:
    """All own branches in stored order, but chosen before rejected."""
    rows = np.arange(len(layout.starts))
    indices = joined_ranges(layout.starts, layout.num_own)
    is_rejected = roles[indices] == Role.REJECTED
    indices = indices[np.lexsort((is_rejected, np.repeat(rows, layout.num_own)))]
    return Own(rows, offsets_of(layout.num_own), indices, roles[indices], scores[indices])


def _by_shares(own: Own, split_keys: NDArray[np.uint64], spec: ReadSpec) -> NDArray[np.bool_]:
    """Mask of the branches that the shares of labels leave; all of held-out rows."""
    shares, keys = spec.label_shares, split_keys[own.rows]
    by_label = {
        Role.DESIRABLE: shares.with_desirable(keys),
        Role.UNDESIRABLE: shares.with_undesirable(keys),
    }
    kept = held_out(keys, spec.eval_fraction)[own.row_of]
    for role, with_label in by_label.items():
        kept |= with_label[own.row_of] & (own.roles == role)
    return kept


def _counted(stored: Own, made: Own) -> KindCounts:
    read = np.isin(stored.rows, made.rows)
    return KindCounts(
        stored=len(stored.rows),
        read=int(read.sum()),
        made=len(made.rows),
        unscored=int((~stored.is_scored).sum()),
        left_out=int(stored.counts[read].sum()) - len(np.unique(made.indices)),
    )


def as_read(stored: Rows, rows: NDArray[np.int64], *, spec: ReadSpec, source: str) -> Rows:
    """The rows at `rows` of those that a method reads of a row group, laid out as stored.

    They have only the branches that the method reads, with mismatches if it reads any.
    """
    picked = select(
        stored.roles,
        stored.scores,
        stored.branch_offsets,
        spec=spec,
        source=source,
        split_keys=stored.split_key,
    )
    counts = np.diff(picked.branch_offsets)[rows]
    own = joined_ranges(picked.branch_offsets[rows], counts)
    partners = picked.mismatched.shape[1] if spec.mismatched else 0
    branches = np.concatenate([picked.own[own], picked.mismatched[own, :partners].T.ravel()])
    row_of = np.tile(np.repeat(np.arange(len(rows)), counts), 1 + partners)
    order = np.argsort(row_of, kind="stable")
    others = np.full(partners * len(own), Role.MISMATCHED, dtype=np.int8)
    scores = np.concatenate([picked.scores[own], stored.scores[branches[len(own) :]]])
    offsets = offsets_of(counts * (1 + partners))
    read = stored.gather(picked.rows[rows], branches[order], offsets)
    return read.with_columns(
        prompt_ids=_prompts(read.prompts, picked, rows, spec),
        role=np.concatenate([picked.roles[own], others])[order],
        score=scores[order],
    )


def context_lengths(picked: Selection, spec: ReadSpec) -> NDArray[np.int64]:
    """The number of tokens that are added to the prompt of each row, (rows,)."""
    lengths = np.zeros(len(picked.rows), dtype=np.int64)
    for role, tokens in spec.context.items():
        lengths[picked.roles[picked.branch_offsets[:-1]] == role] = len(tokens)
    return lengths


def _prompts(prompts: Ragged, picked: Selection, rows: NDArray[np.int64], spec: ReadSpec) -> Ragged:
    if not spec.context:
        return prompts
    roles = picked.roles[picked.branch_offsets[:-1][rows]].tolist()
    more = [np.array(spec.context[Role(role)], dtype=np.int32) for role in roles]
    return Ragged.of(
        [np.append(ids, end) for ids, end in zip(prompts, more, strict=True)], np.int32
    )
