"""The record of a checkpoint: where training was, and the files to resume from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from .batches import Cursor

T = TypeVar("T")

FORMAT_VERSION = 3  # since 3 a checkpoint names the run it is of


How = Literal["finished", "signal", "time", "failed"]


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint, or of a run that has ended."""

    path: str  # relative to the folder, parts joined by /
    bytes: int
    sha256: str


@dataclass(frozen=True)
class FittedBatches:
    """What a run has learned of its memory, for its next start."""

    planned: int  # tokens of a micro-batch that did not fit
    fits: int  # tokens to run instead


@dataclass(frozen=True)
class RankFiles:
    """What one rank wrote and made durable, or why it could not."""

    files: tuple[CheckpointFile, ...]
    failure: str = ""


@dataclass(frozen=True)
class RunIdentity:
    """What must be the same for a run to be resumed; values by name, as a person reads them."""

    cache_root: str
    world_size: int
    zero_stage: int
    settings: dict[str, str]  # with the policy's files: known before a weight is loaded
    computed: dict[str, str]  # what the loaded policy and its engine compute with


@dataclass(frozen=True)
class Position:
    """Where training is, and what a run must match to resume from here."""

    global_step: int  # optimizer steps done
    cursor: Cursor  # the next step
    identity: RunIdentity
    made_with: dict[str, str]  # versions and the like: what differs is reported
    changes: tuple[str, ...]  # what was reported to differ on the way here
    journal: CheckpointFile  # metrics.jsonl as it was then
    mlflow_run_id: str
    memory: dict[str, tuple[float, ...]]  # what the methods remember
    window: dict[str, tuple[float, ...]]  # sums and counts of the steps since the last line
    metrics: dict[str, float]  # measured at this very step; the best checkpoint is chosen by one


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint; written last, so that its existence means that all files are there."""

    format_version: int
    align_version: str
    digest: str  # sha256 over all other fields
    position: Position
    files: tuple[CheckpointFile, ...]  # in the order of their paths


@dataclass(frozen=True)
class Ending:
    """How a run ended; written last, and removed before anything is changed again."""

    ending: How
    step: int
    total_steps: int  # of the whole run as it was planned
    identity: RunIdentity
    changes: tuple[str, ...]  # as in the last checkpoint
    files: tuple[CheckpointFile, ...]  # what was measured, and by which settings


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept."""

    keep_last: int
    best: str = ""  # a metric; a leading - asks for the lowest value, + for the highest


class Gather(Protocol):
    """Gathers what each rank passes, in the order of ranks; all ranks call it."""

    def __call__(self, mine: T, /) -> Sequence[T]:
        """What every rank passed."""
        ...


@dataclass(frozen=True)
class Peers:
    """One rank among those that save a checkpoint together."""

    rank: int
    gather: Gather


@dataclass(frozen=True)
class Saved:
    """The result of saving, the same on every rank."""

    step: int
    failure: str = ""  # why there is no checkpoint of this step

    @property
    def succeeded(self) -> bool:
        """Whether the checkpoint is there and durable."""
        return not self.failure


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to resume from."""

    checkpoint: Checkpoint
    set_aside: tuple[str, ...]  # newer ones that were damaged, by their new names
