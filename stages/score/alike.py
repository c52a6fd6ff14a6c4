"""Branches of a unit that are one and the same text behind one and the same prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...schemas.ragged import offsets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...schemas.rows import RowBlock


def first_alike(rows: RowBlock, branches: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of `branches`, the first of them with its prompt and completion."""
    lengths = rows.completions.lengths[branches]
    prompts = prompt_numbers(rows)[rows.row_of_branch[branches]]
    # Few share a prompt and a length: only their ids are worth a look.
    pairs = prompts * (lengths.max(initial=0) + 1) + lengths
    _, kind, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    first = branches.copy()
    seen: dict[tuple[int, bytes], int] = {}
    for place in np.flatnonzero(counts[kind] > 1).tolist():
        branch = int(branches[place])
        ids = rows.completions[branch].tobytes()
        first[place] = seen.setdefault((int(prompts[place]), ids), branch)
    return first


def prompt_numbers(rows: RowBlock) -> NDArray[np.int64]:
    """Numbers the prompts of neighbours; on the ring, all rows of a prompt are neighbours."""
    lengths = rows.prompts.lengths
    near = np.flatnonzero(lengths[1:] == lengths[:-1]) + 1
    mine, before = rows.prompts.take(near), rows.prompts.take(near - 1)
    differing = offsets_of(mine.values != before.values)[mine.offsets]
    is_new = np.ones(len(rows), dtype=np.bool_)
    is_new[near] = np.diff(differing) > 0
    return np.cumsum(is_new) - 1
