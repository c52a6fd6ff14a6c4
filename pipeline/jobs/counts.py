"""Counts of a process's work, which every job keeps; light, for processes that only make tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self


class Counts(Protocol):
    """Counts of one process's work, summed over its tasks."""

    seconds: float

    @property
    def step(self) -> int:
        """The number of new items, which is also the step of the metrics."""
        ...

    def add(self, other: Self) -> None:
        """Adds the counts of other work; of reasons the others' too."""
        for name, theirs in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, mine | theirs if isinstance(mine, dict) else mine + theirs)

    def metrics(self) -> Mapping[str, float]:
        """The counts as metrics of a tracking store."""
        ...

    def text(self) -> str:
        """The counts in a sentence."""
        ...
