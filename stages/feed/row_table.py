"""The few numbers of each row that planning needs; tokens stay on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.rows import offsets_of
from .ranges import joined_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class RowTable:
    """24 bytes a row and 4 a mismatched branch; rows are numbered as they are stored."""

    group_offsets: NDArray[np.int64]  # (row groups + 1,) into the rows
    places: NDArray[np.int32]  # (rows,) each among what its row group is read as
    prompt_tokens: NDArray[np.int32]  # (rows,)
    own_tokens: NDArray[np.int32]  # (rows,) of completions
    chosen_tokens: NDArray[np.int32]  # (rows,) of chosen or desirable ones among them
    branch_offsets: NDArray[np.int64]  # (rows + 1,) into the own branches
    mismatched_tokens: NDArray[np.int32]  # (branches, levels)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def levels(self) -> int:
        """How many mismatched partners each branch has."""
        return int(self.mismatched_tokens.shape[1])

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(column.nbytes for column in vars(self).values())

    def group_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row group each row is stored in."""
        return np.searchsorted(self.group_offsets, rows, side="right") - 1

    def num_branches(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many own branches each row has."""
        return self.branch_offsets[rows + 1] - self.branch_offsets[rows]

    def within_group(self, rows: NDArray[np.int64]) -> RowTable:
        """The rows at `rows` of a table of one row group."""
        counts = self.num_branches(rows)
        branches = joined_ranges(self.branch_offsets[rows], counts)
        return RowTable(
            group_offsets=np.array([0, len(rows)]),
            places=self.places[rows],
            prompt_tokens=self.prompt_tokens[rows],
            own_tokens=self.own_tokens[rows],
            chosen_tokens=self.chosen_tokens[rows],
            branch_offsets=offsets_of(counts),
            mismatched_tokens=self.mismatched_tokens[branches],
        )

    @staticmethod
    def concat(tables: Sequence[RowTable], *, levels: int) -> RowTable:
        """Joins the tables of consecutive row groups; there may be none."""

        def joined(columns: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
            return np.concatenate([np.empty(0, dtype=np.int32), *columns])

        none = np.empty(0, dtype=np.int64)
        sizes = [np.diff(table.group_offsets) for table in tables]
        counts = [np.diff(table.branch_offsets) for table in tables]
        return RowTable(
            group_offsets=offsets_of(np.concatenate([none, *sizes])),
            places=joined([table.places for table in tables]),
            prompt_tokens=joined([table.prompt_tokens for table in tables]),
            own_tokens=joined([table.own_tokens for table in tables]),
            chosen_tokens=joined([table.chosen_tokens for table in tables]),
            branch_offsets=offsets_of(np.concatenate([none, *counts])),
            mismatched_tokens=np.concatenate(
                [np.empty((0, levels), np.int32), *(table.mismatched_tokens for table in tables)]
            ),
        )
