"""Counts rejected rows, refuses too many, and shows the first ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...schemas.errors import BadDataError, counted
from ...schemas.rows import TIE, Rejected

SHOWN = 3  # rows


@dataclass(frozen=True)
class RejectedRows:
    """Counts of rejected rows; ties are not faults, so any number of them is allowed."""

    counts: Mapping[str, int]  # reason -> rows
    rows_in: int
    allowed: float  # the largest share of rows_in

    @property
    def exceed_limit(self) -> bool:
        """Whether more rows than allowed, or all of them, are rejected."""
        is_all = sum(self.counts.values()) == self.rows_in
        return is_all or self._faults.total() > self.allowed * self.rows_in

    @property
    def _faults(self) -> Counter[str]:
        return Counter({reason: rows for reason, rows in self.counts.items() if reason != TIE})

    def require_few(self, first: Sequence[str] = (), *, listed: str = "", hint: str = "") -> None:
        """Refuses more rejected rows than allowed; `listed` is the file that lists them."""
        if not self.exceed_limit:
            return
        shown = "\n  ".join([" The first ones:", *first[:SHOWN]]) + "\n" if first else " "
        where = f"They are listed in {listed} (at most 100,000). " if listed else ""
        raise BadDataError(
            f"{self}.{shown}{where}Fix them, or allow more with --max-bad-frac.{hint}"
        )

    def __str__(self) -> str:
        reasons, ties = self._faults, self.counts.get(TIE, 0)
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        of_faults = f" ({listed})" if listed else ""
        apart = f", and {counted(ties, 'ties')} have no chosen answer" if ties else ""
        return (
            f"{reasons.total()} of {self.rows_in} rows cannot be used{of_faults}{apart}; "
            f"--max-bad-frac allows {self.allowed:g}"
        )


def first_rejected(rows: Sequence[Rejected], path_of: Callable[[int], Path | str]) -> list[str]:
    """The first few rows, with file, row number and reason; `path_of` returns a row's file.

    Ties are shown only if there are no other rows.
    """
    shown = [row for row in rows if row.reason != TIE] or rows
    return [
        f"{path_of(row.file)} row {row.row}: {row.reason}: {row.detail}" for row in shown[:SHOWN]
    ]
