"""Batches that all ranks take together, with common reasons to stop or save, and speeds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ...schemas.errors import AlignError, CorruptionError
from ...schemas.methods import Mean

if TYPE_CHECKING:
    from ...schemas.batches import MicroBatch, StepBatch
    from ...schemas.checkpoint import RunStatus
    from ..engine.deepspeed_engine import DeepSpeedEngine
    from .step import Means


class StopConditions:
    """This rank's reasons to stop or to save, checked before each batch."""

    def __init__(
        self,
        signalled: Callable[[], bool] = lambda: False,
        deadline: float = math.inf,  # on the monotonic clock
        save_seconds: float = 0.0,  # the age at which a checkpoint is renewed; 0: never
    ) -> None:
        self.signalled = signalled
        self.deadline = deadline
        self.save_seconds = save_seconds or math.inf
        self.saved_at = time.monotonic()
        self.failed_on_all = False  # reading rows failed, which ends every rank

    def now(self) -> tuple[bool, bool, bool]:
        """Whether this rank was asked to stop, is out of time, and must save."""
        moment = time.monotonic()
        is_old = moment - self.saved_at >= self.save_seconds
        return self.signalled(), moment >= self.deadline, is_old

    def has_saved(self) -> None:
        """Restarts the clock of checkpoints."""
        self.saved_at = time.monotonic()


class Together:
    """An iterator of batches that ends on all ranks together: after the last, or at a stop."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        batches: Iterator[StepBatch],
        meter: Meter,
        stop: StopConditions,
    ) -> None:
        self._engine, self._batches, self._meter, self._stop = engine, batches, meter, stop
        self.ending: RunStatus | None = None  # the reason of an early end
        self.is_save_due = False  # before the last batch

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        failure: AlignError | None = None
        batch: StepBatch | None = None
        with self._meter.waiting():
            try:
                batch = next(self._batches, None)
            except AlignError as error:
                failure = error
        own = tokens_run(batch, self._meter.pads) if batch else (0, 0)
        signs = [failure is not None, *self._stop.now(), *own]
        # One all-reduce: every rank has the same reasons, and the same batch or none.
        failed, signalled, late, save, tokens, padded = self._engine.total(
            torch.tensor(signs, dtype=torch.float64)
        ).tolist()
        if failed:
            self._stop.failed_on_all = True
            raise failure or CorruptionError("Another rank could not read rows: see its message.")
        if batch is None:
            raise StopIteration
        self._meter.runs(tokens=int(tokens), padded=int(padded))
        if signalled:
            self.ending = "signal"
        elif late:
            self.ending = "time"
        if self.ending:
            raise StopIteration
        self.is_save_due = bool(save)
        return batch


def tokens_run(batch: StepBatch, pads: bool) -> tuple[int, int]:
    """The tokens of a step on this rank, without and with padding."""
    micros: tuple[MicroBatch, ...] = batch.own + batch.mismatched
    sizes = [[tree.num_tokens for tree in micro.trees] for micro in micros if micro.trees]
    tokens = sum(map(sum, sizes))
    padded = sum(len(one) * max(one) for one in sizes) if pads else tokens
    return tokens, padded


class Meter:
    """Measures the times of steps; the time between two laps belongs to the later step."""

    def __init__(self, *, pads: bool) -> None:
        self.pads = pads  # whether a micro-batch is padded to its longest row
        self._tokens = self._padded = 0
        self._waited = 0.0
        self._started = time.monotonic()

    def restart(self) -> None:
        """Drops the time since the last lap."""
        self._started, self._waited = time.monotonic(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the block as waiting for data."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - started

    def runs(self, *, tokens: int, padded: int) -> None:
        """Sets the tokens of the next step over all ranks."""
        self._tokens, self._padded = tokens, padded

    def lap(self, *, rows: int) -> Means:
        """The means of the last step: tokens, speeds, waiting and padding."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        speeds: Means = {
            "tokens": Mean(float(self._tokens), 1.0),
            "speed/tokens_per_second": Mean(float(self._tokens), seconds),
            "speed/rows_per_second": Mean(float(rows), seconds),
            "speed/step_seconds": Mean(seconds, 1.0),
            "speed/data_wait_seconds": Mean(self._waited, 1.0),
            "padding": Mean(float(self._padded - self._tokens), float(max(1, self._padded))),
        }
        self.restart()
        return speeds
