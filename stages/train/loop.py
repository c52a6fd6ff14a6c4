"""The training loop: step after step until the plan, a limit or a signal ends it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol

import torch

from ...schemas.batches import Cursor, Engine, EvalSample, MicroBatch, StepBatch, StepSize
from ...schemas.config import TrainOptions
from ...schemas.errors import AlignError, CorruptionError, NonFiniteError
from ...schemas.methods import Step
from ..methods.recipe import LOSS, MethodState, Recipe
from ..storage.failpoints import reach
from ..tracking.journal import EVAL
from .evaluation import EvalSamples, asks_first, evaluate, whole_step
from .step import StepResult, Totals, added, finite, learning_rate, reported, train_step
from .throughput import Meter, peak_mib

Ending = Literal["finished", "signal", "time"]
Sign = Literal["signal", "time", "save"]  # before a batch: to stop, or only to save


@dataclass(frozen=True)
class Place:
    """The position of training: steps done, and the state that later steps need."""

    step: int  # optimizer steps done, over all epochs
    cursor: Cursor  # the next one
    state: MethodState = field(default_factory=dict)  # of the methods
    window: Totals = field(default_factory=dict)  # of the steps since the last logged line


class Feed(Protocol):
    """The source of batches."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        ...

    @property
    def has_held_out(self) -> bool:
        """Whether there is something to evaluate on."""
        ...

    def held_out_size(self) -> StepSize:
        """All rows of an evaluation, over all ranks."""
        ...

    def steps(self, start: Cursor) -> AbstractContextManager[Iterator[StepBatch]]:
        """This rank's batches from a cursor to the end of the last epoch."""
        ...

    def held_out(self) -> AbstractContextManager[Iterator[StepBatch]]:
        """This rank's batches of the held-out rows."""
        ...


class Records(Protocol):
    """What the loop reports to."""

    def stepped(
        self, place: Place, metrics: dict[str, float], line: dict[str, float] | None
    ) -> None:
        """An optimizer step is done; `line`, if due, holds means since the last logged line."""
        ...

    def evaluated(
        self, place: Place, metrics: dict[str, float], samples: Sequence[EvalSample]
    ) -> None:
        """The held-out rows were measured; `samples` are completions of the first of them."""
        ...

    def not_applied(self, place: Place, row_ids: tuple[str, ...]) -> None:
        """A step gave NaN or infinity; these rows of this rank were in it."""
        ...

    def save(self, place: Place) -> None:
        """Saves a checkpoint, unless there is one of this step already."""
        ...


class SaveClock:
    """Whether a checkpoint is due by time; the ranks agree on it as they agree on stopping."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds or math.inf
        self.restart()

    def restart(self) -> None:
        """Counts from now."""
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


def total_steps(feed: Feed, options: TrainOptions) -> int:
    """Optimizer steps of the whole run."""
    planned = options.epochs * feed.steps_per_epoch
    return min(planned, options.max_steps) if options.max_steps else planned


def train(
    loop: Loop,
    *,
    start: Place,
    records: Records,
    conditions: StopConditions,
    is_measured: bool = False,
) -> tuple[Place, Ending]:
    """Runs from `start` to the end or a stop condition, and saves.

    `is_measured`: the evaluation of `start` has been made already.
    """
    place, ending = _learn(loop, start, records, conditions, is_measured=is_measured)
    records.save(place)
    return place, ending


def _learn(
    loop: Loop, start: Place, records: Records, conditions: StopConditions, *, is_measured: bool
) -> tuple[Place, Ending]:
    place = start
    stopped = None if is_measured else loop.measure(place, records, conditions)
    with loop.feed.steps(start.cursor) as stream:
        batches = SynchronizedBatches(loop.engine, stream, loop.meter, conditions)
        while not stopped and place.step < loop.total_steps:
            batch = next(batches, None)
            if batch is None:
                stopped = batches.stopped
                assert stopped, "there is a batch for every step"
                break
            if batches.is_save_due:
                loop.save(place, records, conditions)
            place = loop.advance(place, batch, records)
            # Saved first: an evaluation may take long, and nothing of it is needed to continue.
            if loop.saves_at(place.step):
                loop.save(place, records, conditions)
            stopped = loop.measure(place, records, conditions)
    return place, stopped or "finished"


@dataclass
class Loop:
    """What every step needs, and how many steps in a row have failed."""

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
        """Runs one step and records its metrics."""
        lr = learning_rate(place.step, self.total_steps, self.options)
        self.engine.set_lr(lr)
        seed = (self.options.seed, place.step)
        reach("step.started")
        result = train_step(
            self.engine,
            self.recipe,
            batch,
            state=place.state,
            seed=seed,
            router_loss=self.options.router_loss,
        )
        reach("step.updated")
        after = Place(place.step + 1, self._next(batch.cursor), result.state)
        self._judge(after, result, records)
        lap = {**self.meter.lap(rows=batch.rows), "step_applied": (float(result.applied), 1.0)}
        window = added(place.window, {**self._lasting(result), **lap})
        epoch = after.step / self.feed.steps_per_epoch
        of_now = {"lr": lr, "epoch": epoch, "memory/peak_mib": peak_mib()}
        metrics = {**reported(self.recipe, {**result.totals, **lap}), **of_now}
        if self._is_due(after.step, self.options.log_every):
            records.stepped(after, metrics, {**reported(self.recipe, window), **of_now})
            return after
        after = replace(after, window=window)
        records.stepped(after, metrics, None)
        return after

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due after a step."""
        return self._is_due(step, self.options.save_every)

    def save(self, place: Place, records: Records, conditions: StopConditions) -> None:
        """Saves a checkpoint; no step counts its time, and the clock of the next one restarts."""
        records.save(place)
        conditions.saving.restart()
        self.meter.restart()

    def measure(self, place: Place, records: Records, conditions: StopConditions) -> Ending | None:
        """Evaluates where it is due and there are rows for it; a stopped one is not recorded.

        Returns why it was stopped.
        """
        is_due = place.step == 0 or self._is_due(place.step, self.options.eval_every)
        if not is_due or not self.feed.has_held_out:
            return None
        samples = EvalSamples(most_rows=self.options.eval_table, keeps_ids=self.options.eval_text)
        step, stopped = self._held_out_step(conditions)
        if not stopped:
            with self._held_out(conditions) as batches:
                metrics = evaluate(
                    self.engine,
                    self.recipe,
                    batches,
                    step=step,
                    state=place.state,
                    samples=samples,
                )
            stopped = batches.stopped
        if not stopped:
            named = {f"{EVAL}{name}": value for name, value in metrics.items()}
            records.evaluated(place, named, samples.gather(self.engine.world))
            reach("evaluation.done")
        self.meter.restart()
        return stopped

    def _held_out_step(self, conditions: StopConditions) -> tuple[Step, Ending | None]:
        """The totals of all held-out rows; runs the policy where a loss needs it."""
        size = self.feed.held_out_size()
        if not asks_first(self.recipe):
            return whole_step(self.engine, self.recipe, (), size), None
        with self._held_out(conditions) as batches:
            step = whole_step(self.engine, self.recipe, batches, size)
        return step, batches.stopped

    @contextmanager
    def _held_out(self, conditions: StopConditions) -> Iterator[SynchronizedBatches]:
        with self.feed.held_out() as stream:
            yield SynchronizedBatches(self.engine, stream, self.meter, conditions)

    def _lasting(self, result: StepResult) -> Totals:
        """What a step adds to its logged line: nothing if its loss is not finite."""
        is_sound = math.isfinite(reported(self.recipe, result.totals)[LOSS])
        return finite(result.totals) if is_sound else {}

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

    def _is_due(self, step: int, every: int) -> bool:
        """Whether this step is one of every `every`, or the last."""
        return step >= self.total_steps or (bool(every) and step % every == 0)


class SynchronizedBatches:
    """Batches that all ranks take in step, until there are no more or some rank has to stop."""

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
    """The next batch, if there is one, and whether some rank has a reason to stop or save first."""
    failure: AlignError | None = None
    batch: StepBatch | None = None
    with meter.waiting():
        try:
            batch = next(batches, None)
        except AlignError as error:
            failure = error
    own = _tokens(batch.own + batch.mismatched, meter.pads) if batch else (0, 0)
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


def _tokens(batches: tuple[MicroBatch, ...], pads: bool) -> tuple[int, int]:
    """Tokens run by this rank, without and with padding."""
    sizes = [[tree.num_tokens for tree in batch.trees] for batch in batches if batch.trees]
    tokens = sum(map(sum, sizes))
    return tokens, sum(len(one) * max(one) for one in sizes) if pads else tokens
