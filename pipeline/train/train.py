"""Stage 2 in one flow: join the ranks, open the run, train step by step, write the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...schemas.batches import EvalSample, MicroBatch, StepBatch
from ...schemas.checkpoint import RunStatus, State
from ...schemas.errors import Interrupted, MemoryLimitError, NonFiniteError, log_failure
from ...schemas.methods import Mean
from ...stages.engine.distributed import (
    gathered,
    joined_world,
    keeping_linear,
    naming_lost_peers,
    run_on_all_ranks,
)
from ...stages.methods.objective import LOSS
from ...stages.model.library_errors import is_out_of_memory
from ...stages.storage.run.checkpoints import best_metric
from ...stages.tracking.metrics_log import EVAL, prefix_of
from ...stages.tracking.progress import Progress
from ...stages.train.evaluation import (
    EvalSamples,
    largest_gap,
    means_of_held_out,
    needs_pre_pass,
    whole_step,
)
from ...stages.train.memory import MicroBatchTooLarge, peak_mib
from ...stages.train.patience import why_over, with_evaluation
from ...stages.train.step import StepResult, added, finite, learning_rate, train_step
from ...stages.train.together import StopConditions, Together, tokens_run
from ..jobs.signals import add_resume_hint, asked_to_stop
from .load import identify, load
from .records import open_records
from .resume import open_folder, require_checkpoint_match
from .setup import Run

if TYPE_CHECKING:
    from .run_report import Trained

SAMPLED_ROWS = 8


def train(run: Run, *, progress: Progress) -> Trained:
    """Trains a policy, or resumes a run; returns its steps and metrics.

    `check` of setup.py makes the run from settings.
    """
    with joined_world() as world, naming_lost_peers(world):
        identify(run, world)
        return train_in(run, progress)


def train_in(run: Run, progress: Progress) -> Trained:
    """Like `train`, after the ranks have joined and the policy is digested."""
    world = run.world
    with add_resume_hint(), naming_lost_peers(world), keeping_linear(), open_folder(run):
        if run.is_finished:
            # Imported late, because it reads what a run wrote.
            from .run_report import reading_of, trained_before  # noqa: PLC0415

            reading = reading_of(run.manifest, run.config.tokens)
            return trained_before(run.folder, reading, writes=world.rank == 0)
        if run.remote and world.rank == 0:
            progress.log(f"working in {run.folder.root}; uploaded to {run.remote.remote.url}")
        load(run, progress)
        require_checkpoint_match(run)
        with open_records(run, progress) as records, naming_lost_peers(world):
            records.log(f"policy: {run.policy.path}")
            if run.checkpoint:
                state = run.checkpoint.state
                saved = run.folder.step(state.step)
                run_on_all_ranks(world, lambda: run.engine.load_state(saved))
            else:
                state = State()
                require_cached_logps(run)
            said_by = progress if world.rank == 0 else Progress()
            with asked_to_stop(said_by.log_in_handler) as asked:
                deadline = run.began + run.max_seconds
                run.stop = StopConditions(asked, deadline, 60 * run.config.train.save_minutes)
                records.begin(state)
                state, ending = learn(run, state)
            reason, model_step = "", None
            if ending == "finished":
                if state.step < run.total_steps:
                    reason = why_over(state.best, run.config.train)
                if reason:
                    done = f"{state.step:,} of {run.total_steps:,} steps"
                    records.log(f"finished after {done}: {reason}")
                # Imported late, because steps do not need it.
                from .trained_model import state_to_write, write_model  # noqa: PLC0415

                of_model = state_to_write(run, state)
                write_model(run, of_model)
                model_step = None if of_model.step == state.step else of_model.step
            records.ended(ending, state.step, reason=reason, model_step=model_step)
            warnings = records.report()
            if ending == "signal":
                raise Interrupted(asked.signal_number or 15, at=stopped_at(run, state.step))
            from .run_report import outcome, reading_of  # noqa: PLC0415 - as above

            reading = reading_of(run.manifest, run.config.tokens)
            return outcome(run.folder, ending, warnings, reading)


def learn(run: Run, state: State) -> tuple[State, RunStatus]:
    """Trains step by step until the last step, train.patience, or a reason to stop."""
    save_every = run.config.train.save_every
    ending: RunStatus | None
    state, ending = evaluated(run, state)
    with run.feed.steps(state.step) as stream:
        batches = Together(run.engine, fitting(run, stream), run.meter, run.stop)
        while not (
            ending or state.step >= run.total_steps or why_over(state.best, run.config.train)
        ):
            batch = next(batches, None)
            if batch is None:
                ending = batches.ending
                assert ending, "every step has a batch"
                break
            if batches.is_save_due:
                save(run, state)
            state = advance(run, state, batch)
            # The evaluation comes first, so that a checkpoint has its numbers. An interrupted one
            # is dropped: the state is saved without it, and the resumed run repeats it.
            state, ending = evaluated(run, state)
            if run.is_due(state.step, save_every):
                save(run, state)
    save(run, state)
    return state, ending or "finished"


def advance(run: Run, state: State, batch: StepBatch) -> State:
    """Runs one optimizer step and records its numbers."""
    options, per_epoch = run.config.train, run.feed.steps_per_epoch
    lr = learning_rate(state.step, run.total_steps, options)
    run.engine.set_lr(lr)
    result = step_that_fits(run, state, batch)
    step = state.step + 1
    run.failures = 0 if result.applied else run.failures + 1
    if run.failures:
        run.records.not_applied(step, result.suspects)
    if run.failures >= options.nonfinite_limit:
        raise NonFiniteError(
            f"Step {step}: the loss or a gradient was NaN or infinite {run.failures} times in a "
            "row, without an update. Check the rows in nonfinite.jsonl, lower train.lr, or use "
            "--dtype float32."
        )
    if result.row_margins:
        run.records.log_margins(step, state.step // per_epoch, result.row_margins)

    # A line of metrics.jsonl has the means of all steps since the last line, without losses that
    # are not finite.
    lap = {**run.meter.lap(rows=batch.rows), "step_applied": Mean(float(result.applied), 1.0)}
    is_sound = math.isfinite(run.objective.reported(result.means)[LOSS])
    lasting = {**(finite(result.means) if is_sound else {}), **lap}
    window = added({name: Mean(*pair) for name, pair in state.window.items()}, lasting)
    of_now = {"lr": lr, "epoch": step / per_epoch, "memory/peak_mib": peak_mib()}
    if run.memory.times:
        of_now["memory/ran_out"] = float(run.memory.times)
    metrics = {**run.objective.reported({**result.means, **lap}), **of_now}
    line = None
    if run.is_due(step, options.log_every) or may_end_at(run, step, state):
        line, window = {**run.objective.reported(window), **of_now}, {}
    state = State(
        step=step,
        methods=result.state,
        window={name: (one.total, one.count) for name, one in window.items()},
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        best=state.best,
        fits=run.fits,
    )
    run.records.stepped(state, metrics, line)
    return state


def step_that_fits(run: Run, state: State, batch: StepBatch) -> StepResult:
    """The result of a step, with smaller micro-batches each time memory runs out."""
    options = run.config.train
    seed = (options.seed, state.step)
    while True:
        try:
            return train_step(
                run.engine, run.objective, batch, state=state.methods, seed=seed, options=options
            )
        except MicroBatchTooLarge as refusal:
            micro = refusal.micro
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryLimitError(run.memory.no_update()) from error
        # Outside the handler, because its traceback keeps the failed batch alive.
        shrink(run, state, micro)
        run.engine.skip()
        torch.cuda.empty_cache()
        batch = run.feed.cut(batch, run.memory.budget)
        tokens, padded = tokens_run(batch, run.meter.pads)
        run.meter.runs(tokens=tokens, padded=padded)


def shrink(run: Run, state: State, micro: MicroBatch) -> None:
    """Halves later micro-batches; with several ranks the run ends, because the others wait."""
    run.memory.shrink(micro)
    run.records.ran_out(state.step, run.memory.budget)
    run.memory.require_alone()


def fitting(run: Run, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
    """The batches, cut into smaller micro-batches once memory has run out."""
    for batch in batches:
        yield run.feed.cut(batch, run.memory.budget) if run.memory.times else batch


def evaluated(run: Run, state: State) -> tuple[State, RunStatus | None]:
    """The state after the evaluation, if one is due and not done yet.

    A stop or an error drops the evaluation; after an error the state is saved without it.
    """
    is_due = state.step == 0 or run.is_due(state.step, run.config.train.eval_every)
    if state.evaluated or not is_due or not run.feed.eval_rows:
        return state, None
    try:
        while True:
            try:
                return measure(run, state)
            except MicroBatchTooLarge as refusal:
                micro = refusal.micro
            shrink(run, state, micro)
            torch.cuda.empty_cache()
    except Exception:
        # One failed rank of several cannot save: the others wait for it in the evaluation.
        if state.step and (run.world.size == 1 or run.stop.failed_on_all):
            with log_failure("No checkpoint before the evaluation that failed"):
                save(run, state)
        raise


def measure(run: Run, state: State) -> tuple[State, RunStatus | None]:
    """Runs each held-out set as one step of the loss, without an update, and records it."""
    options, engine, objective = run.config.train, run.engine, run.objective
    metrics, samples = dict[str, float](), list[EvalSample]()
    for name in run.feed.held_out_sources:
        some = EvalSamples(name, most_rows=options.eval_table, keeps_ids=options.eval_text)
        size = run.feed.held_out_size(name)
        if needs_pre_pass(objective):
            with held_out(run, name) as batches:
                step = whole_step(engine, objective, batches, size)
            if batches.ending:
                return state, batches.ending
        else:
            step = whole_step(engine, objective, (), size)
        with held_out(run, name) as batches:
            means = means_of_held_out(
                engine, objective, batches, step=step, state=state.methods, samples=some
            )
        if batches.ending:
            return state, batches.ending
        metrics |= {f"{prefix_of(name)}{metric}": value for metric, value in means.items()}
        samples += some.gather(run.world)
    best = state.best
    if best_metric(options.best).metric.startswith(EVAL):
        agreed = gathered(run.world, metrics)[0]  # rank 0's numbers, for all ranks
        best = with_evaluation(best, agreed, step=state.step, options=options)
    known = {name: value for name, value in metrics.items() if math.isfinite(value)}
    state = replace(
        state, evaluated=True, metrics={**state.metrics, **known}, best=best, fits=run.fits
    )
    run.records.evaluated(state, metrics, samples)
    run.meter.restart()  # the evaluation's time counts for no step
    return state, None


@contextmanager
def held_out(run: Run, name: str) -> Iterator[Together]:
    """The batches of a held-out set."""
    with run.feed.held_out(name) as stream:
        yield Together(run.engine, fitting(run, stream), run.meter, run.stop)


def save(run: Run, state: State) -> None:
    """Saves a checkpoint, unless this state is saved; the time counts for no step."""
    run.records.save(state)
    run.stop.has_saved()
    run.meter.restart()


def may_end_at(run: Run, step: int, state: State) -> bool:
    """Whether the evaluation after this step may end the run by train.patience."""
    options, best = run.config.train, state.best
    is_waiting = options.patience and best and best.since + 1 >= options.patience
    return bool(is_waiting) and run.is_due(step, options.eval_every)


def require_cached_logps(run: Run) -> None:
    """Requires a policy that starts as the reference to reproduce the cached log-probs."""
    if run.objective.head == "score":
        run.records.log("A reward model has no log-probs to compare with the reference's.")
        return
    if not run.manifest.is_scored:
        run.records.log("The cache is not scored: the policy's log-probs are not compared.")
        return
    if not run.begins_as_reference:
        run.records.log(
            "The policy is not the reference of the cache: its log-probs are not compared."
        )
        return
    sample = run_on_all_ranks(
        run.world, lambda: list(run.cache.sample_rows(run.manifest, SAMPLED_ROWS))
    )
    is_packed = run.config.lora.quantize != "none"
    dtypes = (run.manifest.fingerprint["model.dtype"], run.policy.dtype)
    gap = largest_gap(run.engine, sample, *dtypes, may_differ=is_packed)
    run.records.agreed(gap, is_packed=is_packed)


def stopped_at(run: Run, step: int) -> str:
    """The step of an interrupted run and its checkpoint, as a clause."""
    saved = run.folder.latest_step()
    if saved is None:
        return f" at step {step:,}, without a checkpoint"
    what = "checkpoint saved in" if saved == step else "which is not saved; the last checkpoint is"
    return f" at step {step:,}, {what} {run.folder.step(saved)}"
