"""The training loop: step after step until the plan, a limit or a signal ends it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ...schemas.batches import Cursor
from ...schemas.errors import NonFiniteError
from ..storage.failpoints import reach
from .muster import next_batch
from .schedule import learning_rate
from .step import evaluate, train_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ...schemas.batches import StepBatch
    from ...schemas.config import TrainOptions
    from ...schemas.engine import Engine
    from ..methods.recipe import Memory, Recipe
    from .meter import Meter
    from .step import StepResult

Ending = Literal["finished", "signal", "time"]


@dataclass(frozen=True)
class Place:
    """How far training has come."""

    step: int  # optimizer steps done, over all epochs
    cursor: Cursor  # the next one
    memory: Memory = field(default_factory=dict)  # what the methods remember


class Feed(Protocol):
    """Where batches come from."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        ...

    @property
    def has_held_out(self) -> bool:
        """Whether there is something to evaluate on."""
        ...

    def steps(self, start: Cursor) -> AbstractContextManager[Iterator[StepBatch]]:
        """This rank's batches from a cursor to the end of the last epoch."""
        ...

    def held_out(self) -> AbstractContextManager[Iterator[StepBatch]]:
        """This rank's batches of the rows nothing is learned from."""
        ...


class Records(Protocol):
    """Where the loop tells what happens."""

    def stepped(self, place: Place, metrics: dict[str, float]) -> None:
        """An optimizer step is done."""
        ...

    def evaluated(self, place: Place, metrics: dict[str, float]) -> None:
        """The held-out rows were measured."""
        ...

    def not_applied(self, place: Place, row_ids: tuple[str, ...]) -> None:
        """A step gave NaN or infinity; these rows of this rank were in it."""
        ...

    def save(self, place: Place) -> None:
        """Everything that is needed to go on from here."""
        ...


@dataclass(frozen=True)
class Halts:
    """Reasons from outside to stop, asked before each step on every rank."""

    signalled: Callable[[], bool]
    deadline: float  # on the monotonic clock; infinity for none

    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.deadline


def total_steps(feed: Feed, options: TrainOptions) -> int:
    """Optimizer steps of the whole run."""
    planned = options.epochs * feed.steps_per_epoch
    return min(planned, options.max_steps) if options.max_steps else planned


def train(loop: Loop, *, start: Place, records: Records, halts: Halts) -> tuple[Place, Ending]:
    """Runs from `start` to the end, or to a halt; either way the last thing done is a save."""
    place, total = start, loop.total_steps
    if place.step == 0:
        loop.measure(place, records)
    with loop.feed.steps(start.cursor) as batches:
        while place.step < total:
            batch, halted = next_batch(loop.engine, batches, loop.meter, halts)
            if halted:
                records.save(place)
                return place, halted
            place = loop.advance(place, batch, records)
            if _is_due(place.step, loop.options.save_every, total):
                records.save(place)
    if place.step > start.step or not start.step:
        loop.measure(place, records)
    records.save(place)
    return place, "finished"


@dataclass
class Loop:
    """What stays the same from step to step, and how many in a row have failed."""

    engine: Engine
    recipe: Recipe
    feed: Feed
    options: TrainOptions
    meter: Meter
    failures: int = 0

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return total_steps(self.feed, self.options)

    def advance(self, place: Place, batch: StepBatch, records: Records) -> Place:
        """Runs one step and tells what came of it."""
        lr = learning_rate(place.step, self.total_steps, self.options)
        self.engine.set_lr(lr)
        seed = (self.options.seed, place.step)
        reach("step.started")
        result = train_step(self.engine, self.recipe, batch, memory=place.memory, seed=seed)
        reach("step.updated")
        after = Place(place.step + 1, self._next(batch.cursor), result.memory)
        self._judge(after, result, records)
        speeds = self.meter.lap(rows=batch.rows)
        if _is_due(after.step, self.options.log_every, 0) or after.step == self.total_steps:
            epoch = after.step / self.feed.steps_per_epoch
            records.stepped(after, {**result.metrics, "lr": lr, "epoch": epoch, **speeds})
        if _is_due(after.step, self.options.eval_every, self.total_steps):
            self.measure(after, records)
        return after

    def measure(self, place: Place, records: Records) -> None:
        """Evaluates, when there are rows to evaluate on."""
        if not self.feed.has_held_out:
            return
        with self.feed.held_out() as batches:
            metrics = evaluate(self.engine, self.recipe, batches, memory=place.memory)
        records.evaluated(place, {f"eval/{name}": value for name, value in metrics.items()})
        self.meter.restart()

    def _judge(self, place: Place, result: StepResult, records: Records) -> None:
        if result.applied:
            self.failures = 0
            return
        self.failures += 1
        records.not_applied(place, result.suspects)
        if self.failures >= self.options.nonfinite_limit:
            raise NonFiniteError(
                f"Step {place.step}: the loss or a gradient was NaN or infinite, {self.failures} "
                "times in a row. These steps updated nothing. Their rows are listed in "
                "nonfinite.jsonl: look at them, lower train.lr, or use --dtype float32."
            )

    def _next(self, cursor: Cursor) -> Cursor:
        if cursor.step + 1 < self.feed.steps_per_epoch:
            return Cursor(cursor.epoch, cursor.step + 1)
        return Cursor(cursor.epoch + 1, 0)


def _is_due(step: int, every: int, total: int) -> bool:
    """Every so many steps; what falls on the last step is done once, at the end."""
    return bool(every) and step % every == 0 and step != total
