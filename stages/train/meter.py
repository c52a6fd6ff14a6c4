"""How fast training goes, and what it waits for."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .memory import peak_mib

if TYPE_CHECKING:
    from collections.abc import Iterator


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

    def lap(self, *, rows: int) -> dict[str, float]:
        """The metrics of the step that is over."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        speeds = {
            "tokens": float(self._tokens),
            "speed/tokens_per_second": self._tokens / seconds,
            "speed/rows_per_second": rows / seconds,
            "speed/step_seconds": seconds,
            "speed/data_wait_seconds": self._waited,
            "padding": 1 - self._tokens / max(1, self._padded),
            "memory/peak_mib": peak_mib(),
        }
        self.restart()
        return speeds
