"""What a run measured first and last: on held-out rows, else on those it learned from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..stages.tracking.journal import EVAL

if TYPE_CHECKING:
    from ..stages.tracking.journal import Entry

MeasuredOn = Literal["held out", "training", ""]


@dataclass(frozen=True)
class Measured:
    """Two moments of a run, their metrics named as in its journal."""

    rows: MeasuredOn = ""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)  # empty unless of a later step


class Ends:
    """Sees the lines of a journal go by, and keeps the first and the last of each kind."""

    def __init__(self) -> None:
        self._held_out: list[Entry] = []
        self._learned: list[Entry] = []

    def see(self, entry: Entry) -> None:
        """The next line."""
        names = {point.key for point in entry.points}
        if f"{EVAL}loss" in names:
            self._held_out = [*self._held_out[:1], entry]
        if "loss" in names:
            self._learned = [*self._learned[:1], entry]

    def measured(self) -> Measured:
        """A training step is only looked at where nothing is held out."""
        if self._held_out:
            return Measured("held out", *_moments(self._held_out))
        return Measured("training", *_moments(self._learned))


def _moments(ends: list[Entry]) -> tuple[dict[str, float], dict[str, float]]:
    if not ends:
        return {}, {}
    first, last = ends[0], ends[-1]
    return _values(first), _values(last) if last.step > first.step else {}


def _values(entry: Entry) -> dict[str, float]:
    return {point.key: point.value for point in entry.points}
