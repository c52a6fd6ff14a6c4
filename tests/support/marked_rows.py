"""Rows with columns that somebody adds."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from align.schemas.columns import Ragged, column
from align.schemas.row_keys import KeyedRows
from align.schemas.rows import RowBlock


@dataclass(frozen=True)
class MarkedRows(RowBlock):
    """Rows with a number, branches with a name and a guess, tokens with marks."""

    number: NDArray[np.int64] = column("row", "i8")
    name: NDArray[np.int64] = column("branch", "i8")
    guess: NDArray[np.float64] = column("branch", "f8", missing=-1.0)
    marks: Ragged | None = column("token", "i4", missing=-2, of="completions", is_list=True)


@dataclass(frozen=True)
class MarkedKeys(KeyedRows):
    """Such rows with their keys."""

    rows: MarkedRows = column("row", within=MarkedRows)


def marked(rows, *, with_marks=True):
    """The same rows; each added column says what another one says."""
    ids = rows.completions
    columns = {name: getattr(rows, name) for name in RowBlock.columns()}
    marks = Ragged(ids.values * 2, ids.offsets) if with_marks else None
    return MarkedRows(
        **columns, number=rows.row + 1, name=ids.lengths * 3, guess=rows.roles + 0.5, marks=marks
    )
