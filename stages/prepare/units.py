"""Arcs of the ring: where they begin, and their rows with the mismatched branches added."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.ragged import Ragged
from ...schemas.rows import Role, RowBlock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .ring import Ring
    from .spool import Spool


@dataclass(frozen=True)
class Unit:
    """One arc of the ring, ready to be scored."""

    rows: RowBlock  # own branches first, then the mismatched ones, k by k
    first_key: str
    last_key: str
    quarantined: dict[str, int]


@dataclass(frozen=True)
class CutRule:
    """How a mismatched completion is fitted to its prompt."""

    max_length: int
    eos: int | None


def unit_offsets(
    spool: Spool, *, num_pairs: int, rows_per_unit: int, tokens_per_unit: int
) -> tuple[int, ...]:
    """Row numbers where units begin, and the end; set by the rows alone."""
    ends = spool.column("prompt_ends") + (1 + num_pairs) * _completion_ends_by_row(spool)
    offsets = [0]
    while offsets[-1] < len(ends):
        start = offsets[-1]
        before = int(ends[start - 1]) if start else 0
        full = int(np.searchsorted(ends, before + tokens_per_unit, side="right"))
        offsets.append(min(max(full, start + 1), start + rows_per_unit, len(ends)))
    return tuple(offsets)


def build_unit(ring: Ring, start: int, stop: int, rule: CutRule) -> Unit:
    """Reads rows `start` to `stop` and gives each completion its mismatched partners."""
    keyed = ring.spool.read(start, stop)
    own = keyed.rows
    first = int(ring.spool.column("branch_ends", start - 1, start)[0]) if start else 0
    partners = ring.partners(first, first + len(own.completions)).reshape(-1)
    picked = ring.spool.completions(partners)
    row_of = np.tile(own.row_of_branch, ring.num_pairs)
    room = rule.max_length - own.prompts.lengths[row_of]
    fitted = _fit(picked, room, rule.eos)
    lost = ring.spool.cuts(partners) + picked.lengths - fitted.lengths
    rows = _with_mismatched(own, fitted, lost, ring.num_pairs)
    same = _rows_without_mismatch(own, fitted, picked)
    if len(same):
        rows = rows.take(np.setdiff1d(np.arange(len(own)), same))
    return Unit(
        rows=rows,
        first_key=f"{int(keyed.prompt_keys[0]):016x}",
        last_key=f"{int(keyed.prompt_keys[-1]):016x}",
        quarantined={"too_long": len(same)} if len(same) else {},
    )


def _completion_ends_by_row(spool: Spool) -> NDArray[np.int64]:
    branch_ends = spool.column("branch_ends")
    ends: NDArray[np.int64] = spool.column("completion_ends")[branch_ends - 1]
    return ends


def _fit(completions: Ragged, room: NDArray[np.int64], eos: int | None) -> Ragged:
    """Cuts to the room there is; what was cut never ends with EOS."""
    limits = np.minimum(completions.lengths, room)
    if eos is not None:
        for index in np.flatnonzero(limits < completions.lengths).tolist():
            while limits[index] and completions[index][limits[index] - 1] == eos:
                limits[index] -= 1
    return completions.head(limits)


def _with_mismatched(
    own: RowBlock, mismatched: Ragged, cut: NDArray[np.int64], num_pairs: int
) -> RowBlock:
    """Appends to each row its mismatched branches: all of k = 1, then all of k = 2, ..."""
    count = len(own.completions)
    branch_rows = np.tile(own.row_of_branch, 1 + num_pairs)
    level = np.repeat(np.arange(1 + num_pairs), count)
    order = np.lexsort((np.arange(len(branch_rows)), level, branch_rows))
    extra = len(mismatched)
    roles = np.append(own.roles, np.full(extra, Role.MISMATCHED, dtype=np.int8))
    scores = np.append(own.scores, np.full(extra, np.nan, dtype=np.float32))
    return replace(
        own,
        branch_offsets=own.branch_offsets * (1 + num_pairs),
        completions=Ragged.concat([own.completions, mismatched]).take(order),
        roles=roles[order],
        scores=scores[order],
        cut=np.append(own.cut, cut.astype(np.int32))[order],
    )


def _rows_without_mismatch(own: RowBlock, fitted: Ragged, picked: Ragged) -> NDArray[np.int64]:
    """Rows in which cutting a partner to fit left nothing, or the completion it stands against."""
    was_cut = np.flatnonzero(fitted.lengths < picked.lengths)
    count = len(own.completions)
    row_of_branch = own.row_of_branch
    without = [
        row_of_branch[index % count]
        for index in was_cut.tolist()
        if not len(fitted[index]) or np.array_equal(fitted[index], own.completions[index % count])
    ]
    return np.unique(np.array(without, dtype=np.int64))
