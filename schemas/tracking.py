"""What the pipeline tells the outside world while it works."""

from __future__ import annotations

from dataclasses import dataclass
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

    def log_model_link(self, folder: Path, *, tags: Mapping[str, str]) -> None:
        """Where the model lies that this run made; the model itself stays there."""
        ...

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Labels to search by."""
        ...

    def sync(self) -> None:
        """Makes durable what was logged until now."""
        ...

    def finish(self, status: Status) -> None:
        """The truth about how it ended."""
        ...


@dataclass(frozen=True)
class MetricPoint:
    """One number, as a tracking store keeps it."""

    key: str
    value: float
    step: int
    time_ms: int  # since 1970


@dataclass(frozen=True)
class DatasetNote:
    """Data that went into a run."""

    name: str
    digest: str
    source: str
    context: str


@dataclass(frozen=True)
class ModelLink:
    """A model that a run made, and where it lies."""

    folder: str
    tags: dict[str, str]
    model_id: str  # the store's name for it, empty until the store knows it


@dataclass(frozen=True)
class MlflowRecord:
    """All that MLflow is to be told about a run but its metrics, and what it knows already."""

    format_version: int
    uri: str  # without user and password
    experiment: str
    run_name: str
    key: str  # a tag by which the run is found again when the answer that named it was lost
    run_id: str  # empty until there is one
    began_ms: int
    ended_ms: int
    status: str  # empty while it runs
    tags: dict[str, str]
    params: dict[str, str]
    datasets: tuple[DatasetNote, ...]
    artifacts: dict[str, bool]  # path, and whether the store has it
    models: tuple[ModelLink, ...]
    metrics_sent: int  # bytes of metrics.jsonl that the store is known to have


@dataclass(frozen=True)
class UnendedRun:
    """A run of MLflow that is at work, or whose end MLflow was not told."""

    uri: str  # without user and password
    experiment: str
    key: str  # a tag by which the run is found
    status: str  # empty as long as nobody said how it ended
    ended_ms: int
