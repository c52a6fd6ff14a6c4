"""What a run has measured, by name: of the steps it learned from, and of held-out rows."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..stages.tracking.jsonl import read_entries
from ..stages.tracking.names import EVAL
from .measured import Measured, first_and_last

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Curves = Mapping[str, list[tuple[float, float]]]  # (step, value) by name, steps rising


@dataclass(frozen=True)
class History:
    """A run's journal, read once."""

    steps: int
    measured: Measured  # first and last
    learned: Curves
    held_out: Curves  # their names without the prefix


def history_of(metrics: Path) -> History:
    """Reads the journal of a run."""
    entries = read_entries(metrics, 0, max_points=sys.maxsize)
    learned: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    held_out: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in entries:
        for point in entry.points:
            is_held_out = point.key.startswith(EVAL)
            kept = held_out if is_held_out else learned
            kept[point.key.removeprefix(EVAL)].append((float(entry.step), point.value))
    steps = max((entry.step for entry in entries), default=0)
    return History(steps, first_and_last(entries), dict(learned), dict(held_out))
