"""What a checkpoint says about itself: where training stood, and the files to go on from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from .batches import Cursor  # noqa: TC001 - the codec looks the annotation up

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

FORMAT_VERSION = 2  # since 2 log-probs have no part in the order of an epoch


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint."""

    path: str  # relative to the checkpoint's folder, parts joined by /
    bytes: int
    sha256: str


@dataclass(frozen=True)
class RankFiles:
    """What one rank wrote and made durable, or why it could not."""

    files: tuple[CheckpointFile, ...]
    failure: str = ""


@dataclass(frozen=True)
class Position:
    """Where training stands, and what it would have to be to go on from here."""

    global_step: int  # optimizer steps done
    cursor: Cursor  # the next step
    seed: int
    world_size: int
    zero_stage: int
    cache_root: str
    config_digest: str
    versions: dict[str, str]
    mlflow_run_id: str
    memory: dict[str, tuple[float, ...]]  # what the methods remember
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
class Retention:
    """Which checkpoints are kept."""

    keep_last: int
    best: str = ""  # a metric; a leading - asks for the lowest value, + for the highest


class Gather(Protocol):
    """Tells all ranks what each has to say, in the order of ranks; all of them call it."""

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
    """What became of saving: the same on every rank."""

    step: int
    failure: str = ""  # why there is no checkpoint of this step

    @property
    def succeeded(self) -> bool:
        """Whether the checkpoint is there and durable."""
        return not self.failure


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to go on from."""

    checkpoint: Checkpoint
    set_aside: tuple[str, ...]  # newer ones that were damaged, by their new names
