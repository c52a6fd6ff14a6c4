"""The training loop: step after step until the plan, a limit or a signal ends it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...schemas.batches import Cursor, Engine, EvalSample, MicroBatch, StepBatch, StepSize, Visits
from ...schemas.checkpoint import BestSoFar
from ...schemas.errors import MemoryLimitError, NonFiniteError
from ...schemas.methods import Mean, Step
from ...schemas.train_options import TrainOptions
from ..engine.distributed import gathered
from ..methods.recipe import LOSS, MethodState, Recipe
from ..model.memory.live_memory import is_out_of_memory
from ..storage.disk.failpoints import reach
from ..tracking.journal import EVAL
from .evaluation import EvalSamples, evaluate, needs_pre_pass, whole_step
from .memory_backoff import MemoryBackoff, MicroBatchTooLarge, release_cached_memory
from .patience import follows_evaluations, why_over, with_evaluation
from .step import Means, StepResult, added, finite, learning_rate, reported, train_step
from .synchronized import Ending, StopConditions, SynchronizedBatches, tokens_run
from .throughput import Meter, peak_mib


@dataclass(frozen=True)
class TrainingPosition:
    """The position of training: the steps done, and the state that later steps need."""

    step: int  # optimizer steps done, over all epochs
    cursor: Cursor  # the next one
    state: MethodState = field(default_factory=dict)  # of the methods
    window: Means = field(default_factory=dict)  # of the steps since the last logged line
    best: BestSoFar | None = None  # of the evaluations
    fits: int = 0  # tokens of a micro-batch; 0: memory has not run out with the planned ones


class Feed(Protocol):
    """The source of batches."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        ...

    @property
    def planned_steps(self) -> int:
        """Optimizer steps in all epochs."""
        ...

    @property
    def has_held_out(self) -> bool:
        """Whether there are rows to evaluate on."""
        ...

    def held_out_size(self) -> StepSize:
        """The size of an evaluation over all ranks."""
        ...

    def steps(self, start: Cursor) -> AbstractContextManager[Iterator[StepBatch]]:
        """This rank's batches from a cursor to the end of the last epoch."""
        ...

    def held_out(self) -> AbstractContextManager[Iterator[StepBatch]]:
        """This rank's batches of the held-out rows."""
        ...

    def cut(self, batch: StepBatch, tokens: int) -> StepBatch:
        """The batch of a single rank in micro-batches of at most `tokens` tokens."""
        ...


class Records(Protocol):
    """The recorder that the loop reports to."""

    def stepped(
        self, position: TrainingPosition, metrics: dict[str, float], line: dict[str, float] | None
    ) -> None:
        """Records an optimizer step; `line`, if due, holds means since the last logged line."""
        ...

    def evaluated(
        self, position: TrainingPosition, metrics: dict[str, float], samples: Sequence[EvalSample]
    ) -> None:
        """Records an evaluation; `samples` are completions of the first held-out rows."""
        ...

    def ran_out(self, step: int, tokens: int) -> None:
        """Records that memory ran out, and the token budget of micro-batches from here on."""
        ...

    def not_applied(self, position: TrainingPosition, row_ids: tuple[str, ...]) -> None:
        """Records a step with NaN or infinity, and this rank's rows in it."""
        ...

    def visited(self, position: TrainingPosition, epoch: int, visits: Visits) -> None:
        """Records the margins of this rank's rows in a step of this epoch."""
        ...

    def save(self, position: TrainingPosition) -> None:
        """Saves a checkpoint, unless there is one of this step already."""
        ...


def total_steps(feed: Feed, options: TrainOptions) -> int:
    """The number of optimizer steps of the whole run."""
    planned = feed.planned_steps
    return min(planned, options.max_steps) if options.max_steps else planned


def train(
    loop: Loop,
    *,
    start: TrainingPosition,
    records: Records,
    conditions: StopConditions,
    is_measured: bool = False,
) -> tuple[TrainingPosition, Ending]:
    """Trains from `start` to the end or a stop condition, and saves.

    `is_measured`: whether `start` has been evaluated already.
    """
    position, ending = _learn(loop, start, records, conditions, is_measured=is_measured)
    records.save(position)
    return position, ending


def _learn(
    loop: Loop,
    start: TrainingPosition,
    records: Records,
    conditions: StopConditions,
    *,
    is_measured: bool,
) -> tuple[TrainingPosition, Ending]:
    measured = (start, None) if is_measured else loop.measure(start, records, conditions)
    position, stopped = measured
    with loop.feed.steps(start.cursor) as stream:
        fitted = map(loop.fitted, stream)
        batches = SynchronizedBatches(loop.engine, fitted, loop.meter, conditions)
        while not stopped and not loop.is_over(position):
            batch = next(batches, None)
            if batch is None:
                stopped = batches.stopped
                assert stopped, "there is a batch for every step"
                break
            if batches.is_save_due:
                loop.save(position, records, conditions)
            position = loop.advance(position, batch, records)
            # Saved first: an evaluation may take long, and nothing of it is needed to continue.
            if loop.saves_at(position.step):
                loop.save(position, records, conditions)
            position, stopped = loop.measure(position, records, conditions)
    return position, stopped or "finished"


@dataclass
class Loop:
    """The parts that every step needs, and the count of consecutive failed steps."""

    engine: Engine
    recipe: Recipe
    feed: Feed
    options: TrainOptions
    meter: Meter
    backoff: MemoryBackoff
    failures: int = 0

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return total_steps(self.feed, self.options)

    def is_over(self, position: TrainingPosition) -> bool:
        """Whether nothing is left to do: no step, or no patience."""
        return position.step >= self.total_steps or bool(why_over(position.best, self.options))

    def why_early(self, position: TrainingPosition) -> str:
        """The reason for an end before the last step; empty if there is none."""
        is_last = position.step >= self.total_steps
        return "" if is_last else why_over(position.best, self.options)

    def advance(
        self, position: TrainingPosition, batch: StepBatch, records: Records
    ) -> TrainingPosition:
        """Runs one step and records its metrics."""
        lr = learning_rate(position.step, self.total_steps, self.options)
        self.engine.set_lr(lr)
        seed = (self.options.seed, position.step)
        reach("step.started")
        result = self._run(batch, position.state, seed, records)
        reach("step.updated")
        cursor = self._next(batch.cursor)
        fits = self.backoff.budget
        after = TrainingPosition(
            position.step + 1, cursor, result.state, best=position.best, fits=fits
        )
        self._judge(after, result, records)
        if result.visits:
            records.visited(after, batch.cursor.epoch, result.visits)
        lap = {**self.meter.lap(rows=batch.rows), "step_applied": Mean(float(result.applied), 1.0)}
        window = added(position.window, {**self._lasting(result), **lap})
        epoch = after.step / self.feed.steps_per_epoch
        of_now = {"lr": lr, "epoch": epoch, "memory/peak_mib": peak_mib()}
        if self.backoff.times:
            of_now["memory/ran_out"] = float(self.backoff.times)
        metrics = {**reported(self.recipe, {**result.means, **lap}), **of_now}
        if self._is_due(after.step, self.options.log_every) or self._may_end_at(after):
            records.stepped(after, metrics, {**reported(self.recipe, window), **of_now})
            return after
        after = replace(after, window=window)
        records.stepped(after, metrics, None)
        return after

    def fitted(self, batch: StepBatch) -> StepBatch:
        """The batch, cut into the smaller micro-batches that are known to fit."""
        return self.feed.cut(batch, self.backoff.budget) if self.backoff.times else batch

    def _run(
        self, batch: StepBatch, state: MethodState, seed: tuple[int, int], records: Records
    ) -> StepResult:
        """Runs a step, in ever smaller micro-batches until they fit."""
        while True:
            try:
                return train_step(
                    self.engine,
                    self.recipe,
                    batch,
                    state=state,
                    seed=seed,
                    options=self.options,
                )
            except MicroBatchTooLarge as refusal:
                micro = refusal.micro
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise MemoryLimitError(self.backoff.no_update()) from error
            # Outside the handler: the traceback no longer keeps the failed batch alive.
            self._shrink(micro, seed[1], records)
            self.engine.skip()
            release_cached_memory()
            batch = self.fitted(batch)
            tokens, padded = tokens_run(batch.own + batch.mismatched, self.meter.pads)
            self.meter.runs(tokens=tokens, padded=padded)

    def _shrink(self, micro: MicroBatch, step: int, records: Records) -> None:
        self.backoff.shrink(micro)
        records.ran_out(step, self.backoff.budget)
        self.backoff.require_alone()

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due after a step."""
        return self._is_due(step, self.options.save_every)

    def save(
        self, position: TrainingPosition, records: Records, conditions: StopConditions
    ) -> None:
        """Saves a checkpoint; its time counts for no step, and the save clock restarts."""
        records.save(position)
        conditions.saving.restart()
        self.meter.restart()

    def measure(
        self, position: TrainingPosition, records: Records, conditions: StopConditions
    ) -> tuple[TrainingPosition, Ending | None]:
        """Evaluates if it is due and rows are held out; a stopped evaluation is not recorded.

        Returns the position with the evaluation counted, and the reason it was stopped for.
        """
        is_due = position.step == 0 or self._is_due(position.step, self.options.eval_every)
        if not is_due or not self.feed.has_held_out:
            return position, None
        while True:
            try:
                return self._measure(position, records, conditions)
            except MicroBatchTooLarge as refusal:
                micro = refusal.micro
            self._shrink(micro, position.step, records)
            release_cached_memory()

    def _measure(
        self, position: TrainingPosition, records: Records, conditions: StopConditions
    ) -> tuple[TrainingPosition, Ending | None]:
        samples = EvalSamples(most_rows=self.options.eval_table, keeps_ids=self.options.eval_text)
        step, stopped = self._held_out_step(conditions)
        if not stopped:
            with self._held_out(conditions) as batches:
                metrics = evaluate(
                    self.engine,
                    self.recipe,
                    batches,
                    step=step,
                    state=position.state,
                    samples=samples,
                )
            stopped = batches.stopped
        if not stopped:
            named = {f"{EVAL}{name}": value for name, value in metrics.items()}
            position = self._counted(replace(position, fits=self.backoff.budget), named)
            records.evaluated(position, named, samples.gather(self.engine.world))
            reach("evaluation.done")
        self.meter.restart()
        return position, stopped

    def _counted(self, position: TrainingPosition, named: dict[str, float]) -> TrainingPosition:
        """The position with one more evaluation; the numbers of rank 0 decide for all ranks."""
        if not follows_evaluations(self.options):
            return position
        agreed = gathered(self.engine.world, named)[0]
        best = with_evaluation(position.best, agreed, step=position.step, options=self.options)
        return replace(position, best=best)

    def _held_out_step(self, conditions: StopConditions) -> tuple[Step, Ending | None]:
        """The totals of all held-out rows; runs the policy where a loss needs it."""
        size = self.feed.held_out_size()
        if not needs_pre_pass(self.recipe):
            return whole_step(self.engine, self.recipe, (), size), None
        with self._held_out(conditions) as batches:
            step = whole_step(self.engine, self.recipe, batches, size)
        return step, batches.stopped

    @contextmanager
    def _held_out(self, conditions: StopConditions) -> Iterator[SynchronizedBatches]:
        with self.feed.held_out() as stream:
            batches = map(self.fitted, stream)
            yield SynchronizedBatches(self.engine, batches, self.meter, conditions)

    def _lasting(self, result: StepResult) -> Means:
        """The means a step adds to the next logged line: none if its loss is not finite."""
        is_sound = math.isfinite(reported(self.recipe, result.means)[LOSS])
        return finite(result.means) if is_sound else {}

    def _judge(self, position: TrainingPosition, result: StepResult, records: Records) -> None:
        if result.applied:
            self.failures = 0
            return
        self.failures += 1
        records.not_applied(position, result.suspects)
        if self.failures >= self.options.nonfinite_limit:
            raise NonFiniteError(
                f"Step {position.step}: the loss or a gradient was NaN or infinite, "
                f"{self.failures} times in a row. These steps updated nothing. Their rows are "
                "listed in nonfinite.jsonl: look at them, lower train.lr, or use --dtype float32."
            )

    def _next(self, cursor: Cursor) -> Cursor:
        if cursor.step + 1 < self.feed.steps_per_epoch:
            return Cursor(cursor.epoch, cursor.step + 1)
        return Cursor(cursor.epoch + 1, 0)

    def _may_end_at(self, position: TrainingPosition) -> bool:
        """Whether the evaluation after this step may be the last that patience waits for."""
        best, options = position.best, self.options
        is_waiting = options.patience and best and best.since + 1 >= options.patience
        return bool(is_waiting) and self._is_due(position.step, options.eval_every)

    def _is_due(self, step: int, every: int) -> bool:
        """Whether this step is a multiple of `every`, or the last."""
        return step >= self.total_steps or (bool(every) and step % every == 0)
