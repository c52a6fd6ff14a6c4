"""The units that the ring is cut into for scoring: each completion with its mismatched partners."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...schemas.columns import offsets_of
from ...schemas.rows import Rejected, Role, RowBlock
from .fitted_partners import CutRule, FittedPartners, fit_partners
from .ring import Ring


@dataclass(frozen=True)
class Unit:
    """A consecutive slice of the ring's rows, ready to be scored: one shard."""

    rows: RowBlock  # own branches first, then the mismatched ones, k by k
    first_key: str
    last_key: str
    rejected: tuple[Rejected, ...]
    replaced: int  # partners that cutting had made alike, and others stand in for


def unit_offsets(
    sizes: Iterable[NDArray[np.int64]],  # (2, rows) each: tokens of prompts, of all completions
    *,
    num_pairs: int,
    rows_per_unit: int,
    tokens_per_unit: int,
) -> tuple[int, ...]:
    """Row numbers where units begin, and the end; set by the rows alone."""
    offsets, tokens, first = [0], 0, 0
    for prompts, completions in sizes:
        last = first + len(prompts)
        # Tokens up to each row; how long mismatched completions are is estimated by its own.
        ends = offsets_of(prompts + (1 + num_pairs) * completions)
        row = first
        while row < last:
            start = offsets[-1]
            before = int(ends[row - first])
            fit = np.searchsorted(ends[1:], before + tokens_per_unit - tokens, side="right")
            stop = min(first + int(fit), start + rows_per_unit, last)
            if row == start:
                stop = max(stop, start + 1)  # however long it is
            tokens += int(ends[stop - first]) - before
            if stop < last:
                offsets.append(stop)
                tokens = 0
            row = stop
        first = last
    return tuple(offsets if offsets[-1] == first else [*offsets, first])


def build_unit(ring: Ring, start: int, stop: int, rule: CutRule) -> Unit:
    """Reads rows `start` to `stop` and gives each completion its mismatched partners."""
    keyed = ring.rows.read(start, stop)
    first = ring.rows.first_completion(start)
    chosen = ring.partners(first, first + len(keyed.rows.completions)).reshape(-1)
    partners = fit_partners(ring.rows, keyed, chosen, rule)
    rows = _with_mismatched(keyed.rows, partners, ring.num_pairs)
    if partners.missing:
        rows = rows.take(np.setdiff1d(np.arange(len(rows)), list(partners.missing)))
    return Unit(
        rows=rows,
        first_key=f"{int(keyed.ring_keys[0]):016x}",
        last_key=f"{int(keyed.ring_keys[-1]):016x}",
        rejected=tuple(
            Rejected(int(keyed.rows.file[row]), int(keyed.rows.row[row]), "no_mismatch", why)
            for row, why in sorted(partners.missing.items())
        ),
        replaced=int((partners.numbers != chosen).sum()),
    )


def _with_mismatched(own: RowBlock, mismatched: FittedPartners, num_pairs: int) -> RowBlock:
    """Appends to each row its mismatched branches: all of k = 1, then all of k = 2, ..."""
    count = len(own.completions)
    branch_rows = np.tile(own.row_of_branch, 1 + num_pairs)
    k = np.repeat(np.arange(1 + num_pairs), count)
    order = np.lexsort((np.arange(len(branch_rows)), k, branch_rows))
    added = mismatched.rows.brought_along()
    added["roles"] = np.full_like(mismatched.rows.roles, Role.MISMATCHED)
    return own.with_branches(order, own.branch_offsets * (1 + num_pairs), **added)
