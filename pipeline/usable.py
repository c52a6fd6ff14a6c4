"""What of the data cannot be used, held against what the user allows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..schemas.cache import FileEntry

FILES_SHOWN = 3


@dataclass(frozen=True)
class Losses:
    """Rows in quarantine."""

    counts: Mapping[str, int]  # reason -> rows
    rows_in: int
    rows_left: int
    allowed: float  # the largest share of rows_in
    files: tuple[FileEntry, ...]  # where they are listed

    @property
    def are_too_many(self) -> bool:
        """Whether more are lost than allowed, or nothing is left."""
        return not self.rows_left or sum(self.counts.values()) > self.allowed * self.rows_in

    def __str__(self) -> str:
        reasons = Counter(self.counts)
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        return (
            f"{reasons.total()} of {self.rows_in} rows cannot be used ({counts}); "
            f"--max-bad-frac allows {self.allowed:g}"
        )

    def listed(self, folder: Path) -> str:
        """The files of a cache folder that name them, the first few of many."""
        shown = [str(folder / entry.file) for entry in self.files[:FILES_SHOWN]]
        more = len(self.files) - len(shown)
        return ", ".join(shown) + (f" and {more} more files beside them" if more else "")
