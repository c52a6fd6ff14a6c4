"""The record of a checkpoint: the state of a training, and the files to resume from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

How = Literal["finished", "signal", "time", "failed"]


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint, or of a model in a store."""

    path: str  # relative to the folder, parts joined by /
    bytes: int
    sha256: str


@dataclass(frozen=True)
class FittedBatches:
    """The micro-batches that fit into memory where it ran out with the planned ones."""

    planned: int  # tokens of a micro-batch that was asked for
    fits: int  # tokens to run instead


@dataclass(frozen=True)
class RunIdentity:
    """The values that must be the same for a run to be resumed, by name."""

    cache_root: str
    world_size: int
    zero_stage: int
    settings: dict[str, str]  # with the policy's files: known before a weight is loaded
    computed: dict[str, str]  # numerics of the loaded policy and its engine


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run so far, and how many in a row were no better."""

    metric: str  # as train.best has it
    value: float | None  # None: it was not finite yet
    step: int
    since: int  # evaluations after the best one


@dataclass(frozen=True)
class State:
    """The state of a training besides its engine's: all that later steps depend on."""

    step: int = 0  # optimizer steps done, over all epochs
    evaluated: bool = False  # whether an evaluation that is due at this step has been made
    methods: dict[str, tuple[float, ...]] = field(default_factory=dict)  # of those that have one
    # Sums and counts of the steps since the last logged line.
    window: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # Finite ones, measured at this very step; the best checkpoint is chosen by one.
    metrics: dict[str, float] = field(default_factory=dict)
    best: Best | None = None  # where train.best is of held-out rows
    fits: FittedBatches | None = None  # None: memory has not run out


@dataclass(frozen=True)
class Checkpoint:
    """The record of a whole checkpoint, written last: it exists only if all files do."""

    align_version: str
    identity: RunIdentity
    made_with: dict[str, str]  # versions and the like: differences are reported
    changes: tuple[str, ...]  # the differences reported so far
    state: State
    files: tuple[CheckpointFile, ...] = ()  # in the order of their paths


@dataclass(frozen=True)
class Ending:
    """The record of a run's end, written last, and removed before anything is changed again."""

    ending: How
    step: int
    total_steps: int  # of the whole run as it was planned
    identity: RunIdentity
    changes: tuple[str, ...]  # as in the last checkpoint
    reason: str = ""  # why it ended before its last step
    model_step: int | None = None  # whose model was written, if not the last step's
