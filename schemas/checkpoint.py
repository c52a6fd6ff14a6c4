"""The record of a checkpoint: the state of a training, and the files to resume from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# How a run ended. Only "finished" writes a model; "signal" and "time" resume from a checkpoint.
RunStatus = Literal["finished", "signal", "time", "failed"]


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint, or of a model in a store."""

    path: str  # relative to the folder, parts joined by /
    bytes: int
    sha256: str


@dataclass(frozen=True)
class FittedBatches:
    """The micro-batch size that fits, after memory ran out with the planned one."""

    planned: int  # tokens per micro-batch
    fits: int  # tokens per micro-batch to run instead


@dataclass(frozen=True)
class RunIdentity:
    """The values, by name, that must match when a run is resumed."""

    cache_root: str
    world_size: int
    zero_stage: int
    settings: dict[str, str]  # settings and digests of files, known before weights are loaded
    computed: dict[str, str]  # numerics of the loaded policy and its engine


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run so far, and the number of evaluations since."""

    metric: str  # as in train.best
    value: float | None  # None: not finite so far
    step: int
    since: int  # evaluations after the best one


@dataclass(frozen=True)
class State:
    """The state of a training that later steps depend on, except the engine's."""

    step: int = 0  # optimizer steps done, over all epochs
    evaluated: bool = False  # whether the evaluation due at this step is done
    methods: dict[str, tuple[float, ...]] = field(default_factory=dict)  # state by method
    # Sums and counts of the steps since the last logged line.
    window: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # Finite metrics of this step; one of them chooses the best checkpoint.
    metrics: dict[str, float] = field(default_factory=dict)
    best: Best | None = None  # if train.best names a held-out metric
    fits: FittedBatches | None = None  # None: memory has not run out


@dataclass(frozen=True)
class Checkpoint:
    """The record of a checkpoint; written last, so it exists only if all files do."""

    align_version: str
    identity: RunIdentity
    made_with: dict[str, str]  # versions and devices; differences are reported on resume
    changes: tuple[str, ...]  # the differences reported so far
    state: State
    files: tuple[CheckpointFile, ...] = ()  # in the order of their paths


@dataclass(frozen=True)
class RunEnding:
    """The record of how a run ended; written last, and removed before the run is resumed."""

    ending: RunStatus
    step: int
    total_steps: int  # planned steps of the whole run
    identity: RunIdentity
    changes: tuple[str, ...]  # as in the last checkpoint
    reason: str = ""  # why the run ended before its last step
    model_step: int | None = None  # step of the written model, if not the last one
