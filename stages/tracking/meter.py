"""How far a task has come, in numbers and in words."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta


@dataclass
class Meter:
    """Counts what is done of one task."""

    task: str
    total: int | None
    unit: str
    done: int = 0
    tokens: int = 0  # run through the model, padding included
    padding: int = 0
    started: float = field(default_factory=time.monotonic)

    def add(self, done: int, tokens: int, padding: int) -> None:
        """Counts so many more."""
        self.done += done
        self.tokens += tokens
        self.padding += padding

    def opening(self) -> str:
        """What is about to be done."""
        return self.task if self.total is None else f"{self.task}: {self.total:,} {self.unit}"

    def so_far(self) -> str:
        """What is done by now, and when the rest will be."""
        left = self._left()
        parts = [self.counted(), *self._speed()]
        return f"{self.task}: {', '.join(parts + ([f'{left} left'] if left else []))}"

    def closing(self) -> str:
        """What was done in all, and how long it took."""
        counted = self.counted() if self.done != self.total else f"{self.done:,} {self.unit}"
        took = f"{counted} in {_clock(self._elapsed())}"
        return f"{self.task}: {', '.join([took, *self._speed()])}"

    def counted(self) -> str:
        """How many are done, of how many."""
        if not self.total:
            return f"{self.done:,} {self.unit}"
        return f"{self.done:,} of {self.total:,} {self.unit} ({self.done / self.total:.0%})"

    def speed(self) -> str:
        """Tokens per second and padding share, empty before the first token."""
        return ", ".join(self._speed())

    def _speed(self) -> list[str]:
        if not self.tokens:
            return []
        per_second = self.tokens / max(self._elapsed(), 1e-9)
        return [f"{per_second:,.0f} tokens/s", f"{self.padding / self.tokens:.1%} padding"]

    def _left(self) -> str:
        if not self.total or not self.done or self.done >= self.total:
            return ""
        return _clock(self._elapsed() / self.done * (self.total - self.done))

    def _elapsed(self) -> float:
        return time.monotonic() - self.started


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
