"""Gradients that are many times as large as is usual, told from those of the steps before."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

FEWEST = 20  # norms before, to know what is usual
MOST = 50
SPIKE = 10.0  # times their median


@dataclass
class UsualGradient:
    """The norms of the last steps."""

    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=MOST))

    def spike(self, norm: float) -> float:
        """How many times as large as usual a norm is, 0 if it is no spike; it is remembered."""
        usual = statistics.median(self._norms) if len(self._norms) >= FEWEST else 0.0
        self._norms.append(norm)
        return norm / usual if usual and norm > SPIKE * usual else 0.0
