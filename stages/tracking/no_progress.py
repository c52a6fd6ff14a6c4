"""A progress nobody watches."""

from __future__ import annotations


class NoProgress:
    """Takes everything a `Progress` takes and shows none of it."""

    def say(self, line: str) -> None:
        """Shows nothing."""

    def begin(self, task: str, *, total: int | None, unit: str) -> None:
        """Shows nothing."""

    def advance(self, done: int, *, tokens: int = 0, padding: int = 0) -> None:
        """Shows nothing."""

    def end(self) -> None:
        """Shows nothing."""
