"""How fast training goes, and what it waits for."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .sums import Totals


class Meter:
    """Times steps; everything between two laps belongs to the later one."""

    def __init__(self, *, pads: bool) -> None:
        self.pads = pads  # whether a micro-batch is padded to its longest row
        self._tokens = self._padded = 0
        self._waited = 0.0
        self._started = time.monotonic()

    def restart(self) -> None:
        """What was done since the last lap belongs to no step."""
        self._started, self._waited = time.monotonic(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as waiting for data."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - started

    def runs(self, *, tokens: int, padded: int) -> None:
        """The coming step runs so many tokens over all ranks."""
        self._tokens, self._padded = tokens, padded

    def lap(self, *, rows: int) -> Totals:
        """What the step that is over adds to sums: tokens to tokens, seconds to seconds."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        speeds: Totals = {
            "tokens": (float(self._tokens), 1.0),
            "speed/tokens_per_second": (float(self._tokens), seconds),
            "speed/rows_per_second": (float(rows), seconds),
            "speed/step_seconds": (seconds, 1.0),
            "speed/data_wait_seconds": (self._waited, 1.0),
            "padding": (float(self._padded - self._tokens), float(max(1, self._padded))),
        }
        self.restart()
        return speeds
