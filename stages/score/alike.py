"""Branches of a unit that are one and the same text behind one and the same prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
    """Numbers the prompts by their ids: one prompt may have several, and two may have the same."""
    seen: dict[bytes, int] = {}
    numbers = (seen.setdefault(ids.tobytes(), len(seen)) for ids in rows.prompts)
    return np.fromiter(numbers, dtype=np.int64, count=len(rows))
