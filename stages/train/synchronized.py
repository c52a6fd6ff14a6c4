"""Batches synchronized over the ranks, with the reasons to stop or to save before one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from ...schemas.batches import Engine, MicroBatch, StepBatch
from ...schemas.errors import AlignError, CorruptionError
from .throughput import Meter

Ending = Literal["finished", "signal", "time"]
Sign = Literal["signal", "time", "save"]  # before a batch: to stop, or only to save


class SaveClock:
    """The clock of checkpoints that are saved by time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds or math.inf
        self.restart()

    def restart(self) -> None:
        """Restarts the clock."""
        self._since = time.monotonic()

    def is_due(self) -> bool:
        """Whether the last checkpoint is too old."""
        return time.monotonic() - self._since >= self._seconds


@dataclass(frozen=True)
class StopConditions:
    """Reasons to stop or to save, checked before each batch on every rank."""

    signalled: Callable[[], bool]
    deadline: float  # on the monotonic clock; infinity for none
    saving: SaveClock = field(default_factory=SaveClock)

    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline


class SynchronizedBatches:
    """Batches that all ranks take together, until they end or any rank has to stop."""

    def __init__(
        self, engine: Engine, batches: Iterator[StepBatch], meter: Meter, conditions: StopConditions
    ) -> None:
        self._next = partial(next_batch, engine, batches, meter, conditions)
        self.stopped: Ending | None = None
        self.is_save_due = False

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        batch, sign = self._next()
        self.is_save_due = sign == "save"
        self.stopped = None if sign == "save" else sign
        if batch is None or self.stopped:
            raise StopIteration
        return batch


def next_batch(
    engine: Engine, batches: Iterator[StepBatch], meter: Meter, conditions: StopConditions
) -> tuple[StepBatch | None, Sign | None]:
    """The next batch, if there is one, and any rank's reason to stop or save before it."""
    failure: AlignError | None = None
    batch: StepBatch | None = None
    with meter.waiting():
        try:
            batch = next(batches, None)
        except AlignError as error:
            failure = error
    own = tokens_run(batch.own + batch.mismatched, meter.pads) if batch else (0, 0)
    signs = [
        failure is not None,
        conditions.signalled(),
        conditions.is_late(),
        conditions.saving.is_due(),
        *own,
    ]
    failed, signalled, late, save, tokens, padded = engine.total(
        torch.tensor(signs, dtype=torch.float64)
    ).tolist()
    if failure or failed:
        raise failure or CorruptionError("Another rank could not read its rows; it says which.")
    if batch is None:
        return None, None
    meter.runs(tokens=int(tokens), padded=int(padded))
    return batch, "signal" if signalled else "time" if late else "save" if save else None


def tokens_run(batches: tuple[MicroBatch, ...], pads: bool) -> tuple[int, int]:
    """Tokens run by this rank, without and with padding."""
    sizes = [[tree.num_tokens for tree in batch.trees] for batch in batches if batch.trees]
    tokens = sum(map(sum, sizes))
    return tokens, sum(len(one) * max(one) for one in sizes) if pads else tokens
