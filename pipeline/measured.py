"""What a run measured first and last: on held-out rows, else on those it learned from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..stages.tracking.names import EVAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..stages.tracking.jsonl import Entry

MeasuredOn = Literal["held out", "training", ""]


@dataclass(frozen=True)
class Measured:
    """Two moments of a run, their metrics named as in its journal."""

    rows: MeasuredOn = ""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)  # empty unless of a later step


def first_and_last(entries: Sequence[Entry]) -> Measured:
    """Of a run's journal; a training step is only looked at where nothing is held out."""
    if held_out := [one for one in entries if f"{EVAL}loss" in _values(one)]:
        return Measured("held out", *_ends(held_out))
    return Measured("training", *_ends([one for one in entries if "loss" in _values(one)]))


def _ends(entries: Sequence[Entry]) -> tuple[dict[str, float], dict[str, float]]:
    if not entries:
        return {}, {}
    first, last = entries[0], entries[-1]
    return _values(first), _values(last) if last.step > first.step else {}


def _values(entry: Entry) -> dict[str, float]:
    return {point.key: point.value for point in entry.points}
