"""Which branches of stored rows a method reads, and as what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.errors import CorruptionError
from ...schemas.ragged import offsets_of
from ...schemas.rows import Role
from .ranges import joined_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...schemas.methods import RowKind


class StoredKind(IntEnum):
    """What a row was stored as."""

    PAIRED = 0
    UNPAIRED = 1
    SCORED = 2


# A kind of method that reads scores is one more line here.
READS: dict[RowKind, tuple[StoredKind, ...]] = {
    "paired": (StoredKind.PAIRED,),
    "labelled": (StoredKind.PAIRED, StoredKind.UNPAIRED),
}
_LABEL_OF = {Role.CHOSEN: Role.DESIRABLE, Role.REJECTED: Role.UNDESIRABLE}


@dataclass(frozen=True)
class Selection:
    """Of some stored rows those a method reads; the last three are row by row, chosen first."""

    kinds: NDArray[np.int8]  # (stored rows,) every row's StoredKind
    rows: NDArray[np.int64]  # (rows,) those that are read
    branch_offsets: NDArray[np.int64]  # (rows + 1,)
    own: NDArray[np.int64]  # (branches,) places among the stored branches
    mismatched: NDArray[np.int64]  # (branches, levels) the k-th mismatch of each of them
    roles: NDArray[np.int8]  # (branches,) as the method reads them


def select(
    roles: NDArray[np.int8], branch_offsets: NDArray[np.int64], *, kind: RowKind, source: str
) -> Selection:
    """Own branches lead a stored row; after them come all first mismatches, all second ones."""
    layout = _layout(roles, branch_offsets, source)
    kinds = _kinds(roles, layout, source)
    rows = np.flatnonzero(np.isin(kinds, READS[kind]))
    counts = layout.num_own[rows]
    own = joined_ranges(layout.starts[rows], counts)
    is_rejected = roles[own] == Role.REJECTED
    own = own[np.lexsort((is_rejected, np.repeat(rows, counts)))]
    levels = np.arange(1, layout.levels + 1)
    mismatched = own[:, None] + np.repeat(counts, counts)[:, None] * levels
    return Selection(kinds, rows, offsets_of(counts), own, mismatched, _read_as(roles[own], kind))


@dataclass(frozen=True)
class _Layout:
    starts: NDArray[np.int64]  # (rows,)
    num_own: NDArray[np.int64]  # (rows,)
    levels: int  # mismatches of each own branch


def _layout(roles: NDArray[np.int8], branch_offsets: NDArray[np.int64], source: str) -> _Layout:
    starts, num_all = branch_offsets[:-1], np.diff(branch_offsets)
    is_own = roles != Role.MISMATCHED
    num_own = np.diff(offsets_of(is_own)[branch_offsets])
    _require(bool(num_own.all()), source)
    levels = int(num_all[0] // num_own[0]) - 1 if len(starts) else 0
    _require(bool((num_all == num_own * (1 + levels)).all()), source)
    _require(bool(is_own[joined_ranges(starts, num_own)].all()), source)
    return _Layout(starts, num_own, levels)


def _kinds(roles: NDArray[np.int8], layout: _Layout, source: str) -> NDArray[np.int8]:
    own = roles[joined_ranges(layout.starts, layout.num_own)]
    offsets = offsets_of(layout.num_own)

    def count(*wanted: Role) -> NDArray[np.int64]:
        of_row: NDArray[np.int64] = np.diff(offsets_of(np.isin(own, wanted))[offsets])
        return of_row

    is_paired = (count(Role.CHOSEN) == 1) & (count(Role.REJECTED) == 1) & (layout.num_own == 2)
    is_unpaired = count(Role.DESIRABLE, Role.UNDESIRABLE) == layout.num_own
    is_scored = count(Role.CANDIDATE) == layout.num_own
    _require(bool((is_paired | is_unpaired | is_scored).all()), source)
    kinds = np.full(len(is_paired), StoredKind.PAIRED, dtype=np.int8)
    kinds[is_unpaired], kinds[is_scored] = StoredKind.UNPAIRED, StoredKind.SCORED
    return kinds


def _read_as(roles: NDArray[np.int8], kind: RowKind) -> NDArray[np.int8]:
    if kind == "paired":
        return roles
    read = roles.copy()
    for stored, label in _LABEL_OF.items():
        read[roles == stored] = label
    return read


def _require(good: bool, source: str) -> None:
    if not good:
        raise CorruptionError(
            f"{source} holds rows whose branches fit no kind of data. "
            "Restore it from a copy, or make the cache anew."
        )
