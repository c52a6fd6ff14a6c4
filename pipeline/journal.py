"""What a run has measured, by name: of the steps it learned from, and of held-out rows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..stages.tracking.journal import EVAL, all_entries
from .measured import Ends, Measured

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Curves = Mapping[str, list[tuple[float, float]]]  # (step, value) by name, steps rising


@dataclass(frozen=True)
class History:
    """A run's journal, read once."""

    steps: int
    measured: Measured  # first and last
    learned: Curves
    held_out: Curves  # their names without the prefix


def history_of(metrics: Path, *, is_drawn: Callable[[str], bool]) -> History:
    """Reads the journal of a run, line by line; it keeps the curves that are drawn."""
    learned: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    held_out: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    ends, steps = Ends(), 0
    for entry in all_entries(metrics):
        ends.see(entry)
        steps = max(steps, entry.step)
        for point in entry.points:
            kept = held_out if point.key.startswith(EVAL) else learned
            name = point.key.removeprefix(EVAL)
            if is_drawn(name):
                kept[name].append((float(entry.step), point.value))
    return History(steps, ends.measured(), dict(learned), dict(held_out))
