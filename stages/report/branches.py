"""Which branches of a block are the rows' own, and which are mismatched with which of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from ...schemas.errors import CorruptionError
from ...schemas.rows import Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...schemas.rows import RowBlock

Kind: TypeAlias = Literal["paired", "unpaired", "scored"]


@dataclass(frozen=True)
class Branches:
    """Places in the block's branch columns."""

    kind: Kind
    own: NDArray[np.int64]  # (own branches,) in row order
    own_offsets: NDArray[np.int64]  # (rows + 1,) into `own`
    mismatched: NDArray[np.int64]  # (k, own branches): the k-th mismatch of each


def branches_of(rows: RowBlock, *, source: str) -> Branches:
    """Own branches lead a row; after them come all first mismatches, all second ones, ..."""
    is_own = rows.roles != Role.MISMATCHED
    own_offsets = np.concatenate(([0], np.cumsum(is_own)))[rows.branch_offsets]
    num_own, num_all = np.diff(own_offsets), np.diff(rows.branch_offsets)
    levels = int(num_all[0] // num_own[0]) - 1 if num_own.all() else -1
    _require(levels >= 0 and bool((num_all == num_own * (1 + levels)).all()), source)
    own = np.flatnonzero(is_own)
    step = num_own[rows.row_of_branch[own]]
    mismatched = own + np.arange(1, levels + 1)[:, None] * step
    _require(not is_own[mismatched].any(), source)
    return Branches(_kind(rows.roles[own], num_own, source), own, own_offsets, mismatched)


def _kind(roles: NDArray[Any], num_own: NDArray[Any], source: str) -> Kind:
    if (roles == Role.CANDIDATE).all():
        return "scored"
    if np.isin(roles, (Role.DESIRABLE, Role.UNDESIRABLE)).all():
        return "unpaired"
    _require(bool((num_own == 2).all()), source)
    pairs = np.sort(roles.reshape(-1, 2), axis=1)
    _require(bool((pairs == (Role.CHOSEN, Role.REJECTED)).all()), source)
    return "paired"


def _require(good: bool, source: str) -> None:
    if not good:
        raise CorruptionError(
            f"{source} holds rows whose branches fit no kind of data. "
            "Restore it from a copy, or make the cache anew."
        )
