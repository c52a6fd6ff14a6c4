"""What the pipeline tells the outside world while it works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Progress(Protocol):
    """A person watching."""

    def say(self, line: str) -> None:
        """One plain sentence."""
        ...

    def begin(self, task: str, *, total: int | None, unit: str) -> None:
        """A task with so many things to do, when that is known."""
        ...

    def advance(self, done: int, *, tokens: int = 0, padding: int = 0) -> None:
        """So many more are done."""
        ...

    def end(self) -> None:
        """The task is over."""
        ...


class Run(Protocol):
    """A record of one run in a tracking store; never the reason that a run fails."""

    @property
    def run_id(self) -> str:
        """The store's name for this run, empty when nothing is recorded."""
        ...

    def log_params(self, params: Mapping[str, str]) -> None:
        """Settings, flat."""
        ...

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Numbers at one step."""
        ...

    def log_dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """The data that went in, under our own digest."""
        ...

    def log_artifact(self, path: Path) -> None:
        """A file to keep with the run."""
        ...

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Labels to search by."""
        ...

    def finish(self, status: Status) -> None:
        """The truth about how it ended."""
        ...
