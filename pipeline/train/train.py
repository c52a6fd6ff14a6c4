"""Stage 2 in order: join the ranks, read lengths, load and check the policy, train, save it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from ...schemas.batches import Cursor, World
from ...schemas.errors import Interrupted, log_failure
from ...schemas.file_version import Remember
from ...schemas.methods import Mean
from ...stages.engine.deepspeed_config import EngineContext, stage_of
from ...stages.engine.deepspeed_engine import open_engine
from ...stages.engine.distributed import (
    agreed,
    joined_world,
    naming_lost_peers,
    run_on_all_ranks,
)
from ...stages.engine.zero3_loading import freeing_large_blocks, loading_config
from ...stages.feed.cache_index import ShardColumns, unchecked
from ...stages.feed.loader import CacheFeed
from ...stages.feed.train_source import TrainSource, open_source, overlap
from ...stages.methods.recipe import Recipe
from ...stages.model.loading.heads import stored_value_head
from ...stages.model.loading.load import load_model, resolve
from ...stages.model.loading.lora_targets import adapts_experts
from ...stages.model.loading.sharded_load import load_sharded
from ...stages.model.logprobs import causal_model
from ...stages.model.policy import Policy, load_policy
from ...stages.model.transformers_compat import can_recompute, routers_of
from ...stages.report.signs import Sign
from ...stages.storage.cache.verify_cache import check_before_reading, sample_rows
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.run.run_folder import RunFolder
from ...stages.tracking.progress import Progress
from ...stages.train.evaluation import largest_gap
from ...stages.train.loop import Loop, TrainingPosition, train
from ...stages.train.memory_backoff import MemoryBackoff
from ...stages.train.synchronized import SaveClock, StopConditions
from ...stages.train.throughput import Meter, forget_peak
from ..jobs.signals import add_resume_hint, asked_to_stop
from ..plan.cache_checks import require_positions
from ..plan.method_needs import sampling_note
from ..plan.remedies import Situation, memory_savers
from ..plan.setting_checks import learning_rate_note
from ..plan.short_plan import short_plan
from ..plan.workload import feed_settings, planned_tokens
from .checkpointer import planned_by
from .memory_at_start import chosen_to_fit, facts_of_run
from .policy_identity import digest_policies
from .resume import Start, held_to_checkpoint, started
from .run_answers import answer_once
from .run_recorder import RunRecords, open_records
from .run_report import Trained, outcome, write_report
from .trained_model import chosen_model, write_model
from .training_job import Session, TrainingJob

SAMPLED_ROWS = 8


def run_training(job: TrainingJob, *, progress: Progress) -> Trained:
    """Trains a policy, or resumes a run that was stopped; returns its steps and metrics."""
    remember = own_digests()
    with joined_world() as world, naming_lost_peers(world):
        identified = digest_policies([job], world, remember).identified(job)
        return train_in(identified, world, shard_columns(world, remember), progress=progress)


def shard_columns(world: World, remember: Remember, *, keeps: bool = False) -> ShardColumns:
    """Columns of shards whose bytes the first rank of each machine checks for all of its ranks."""
    check = partial(check_before_reading, remember=remember) if world.is_first_here else unchecked
    return ShardColumns(check, keeps=keeps)


def train_in(
    job: TrainingJob, world: World, columns: ShardColumns, *, progress: Progress
) -> Trained:
    """Like `run_training`, for ranks that have joined and a policy that has been digested."""
    with add_resume_hint(), naming_lost_peers(world), started(job, world) as start:
        if start.is_finished:
            signs: tuple[Sign, ...] = ()
            if world.rank == 0 and not start.folder.report.exists():
                with log_failure("No report"):
                    signs = write_report(start.folder.root)
            trained = replace(outcome(start.folder, "finished", signs), is_old=True)
        else:
            trained = _trained(job, world, columns, progress, start)
        if job.config.train.answers and trained.ending == "finished" and world.rank == 0:
            # By now nothing holds the trained policy's memory any more.
            with log_failure("No answers"):
                answer_once(job, start, progress)
        return trained


def _trained(
    job: TrainingJob, world: World, columns: ShardColumns, progress: Progress, start: Start
) -> Trained:
    forget_peak()
    if start.remote and world.rank == 0:
        progress.say(f"working in {start.folder.root}; uploaded to {start.remote.remote.url}")
    session = open_session(job, world, columns, progress, start)
    checked = held_to_checkpoint(session, start)
    # Named here too, so that the report says it.
    with open_records(session, checked, progress) as records, naming_lost_peers(world):
        records.say(f"policy: {session.policy.path}")
        position = _restored(session, checked)
        if position is None:
            _require_agreement(session, records)
            position = TrainingPosition(0, Cursor(0, 0))
        return _learn(session, checked, records, position)


def open_session(
    job: TrainingJob,
    world: World,
    columns: ShardColumns,
    progress: Progress,
    start: Start | None = None,
) -> Session:
    """Reads the training rows, then loads the policy: one copy, and no reference."""
    config = job.config
    source, held_out = run_on_all_ranks(world, lambda: _sources(job, columns))
    recipe, advice = job.recipe.resolve_auto(source.labels)
    if world.rank == 0:
        sampling = sampling_note(recipe, job.manifest)
        rate = learning_rate_note(config.train, config.lora)
        head = _value_head_note(job, recipe)
        for note in filter(None, (*_source_notes(source, held_out), sampling, rate, head, *advice)):
            progress.say(note)
    config = chosen_to_fit(config, facts_of_run(job, recipe, source, world, start), world, progress)
    job = replace(job, config=config)
    policy = run_on_all_ranks(world, lambda: _policy(job, recipe, world))
    is_mixture = bool(routers_of(causal_model(policy.model)))
    if world.rank == 0 and config.lora.enabled and is_mixture and not adapts_experts(policy.model):
        progress.say(
            "The adapter leaves the experts as they are: lora.targets names nothing of theirs, "
            "such as experts.gate_up_proj and experts.down_proj."
        )
    last = getattr(_text_config(policy), "max_position_embeddings", None)
    for some in {id(one): one for one in (source, held_out)}.values():
        require_positions(some, recipe, last)
    recipe = recipe.computed_in(policy.dtype, job.manifest.fingerprint["model.dtype"])
    engine, engine_config = open_engine(
        policy, config.train, world, hidden_size=_text_config(policy).hidden_size
    )
    if policy.is_sharded:
        policy.choose_path(partial(agreed, world))
    planned = planned_tokens(config.train, policy.device.type)
    fits = start.fits(planned) if start else 0
    if fits:
        progress.say(
            f"memory ran out here before with {planned:,} tokens per batch: {fits:,} are used. "
            "A larger or smaller --tokens-per-batch is tried anew."
        )
    pads = not policy.path.packs
    settings = feed_settings(config.train, recipe, world, tokens=fits or planned, pads=pads)
    feed = CacheFeed(source, held_out, settings)
    if world.rank == 0:
        for line in short_plan(feed, policy, config.train, engine_config):
            progress.say(line)
    return Session(
        job=job,
        world=world,
        policy=policy,
        engine=engine,
        engine_config=engine_config,
        source=source,
        recipe=recipe,
        feed=feed,
    )


def _value_head_note(job: TrainingJob, recipe: Recipe) -> str:
    file = stored_value_head(job.policy) if recipe.head == "values" else None
    return f"the value head begins as it was trained before, from {file}" if file else ""


def _policy(job: TrainingJob, recipe: Recipe, world: World) -> Policy:
    """The policy; under ZeRO-3 no rank ever holds the whole of it."""
    train, zero3 = job.config.train, None
    load: Callable[..., Any] = load_model
    if job.zero_stage(world.size) == 3:
        found = resolve(replace(job.policy, dtype=train.dtype))
        context = EngineContext(found.dtype, found.hidden_size, world.size)
        zero3 = loading_config(train, world, context)
    if zero3:
        load = partial(load_sharded, config=zero3, together=partial(run_on_all_ranks, world))
    with freeing_large_blocks() if zero3 else nullcontext():
        policy = load_policy(
            job.policy,
            train,
            job.config.lora,
            head=recipe.head,
            purity="purity" in recipe.needs,
            load=load,
        )
    job.policy_files.require_unchanged()
    return policy


def _sources(job: TrainingJob, columns: ShardColumns) -> tuple[TrainSource, TrainSource]:
    """The training rows, and the evaluation rows: held out of them, or of another cache."""
    source = open_source(job.cache, job.manifest, job.read_spec, columns)
    if job.held_out is None:
        return source, source
    of_held_out = replace(job.read_spec, eval_fraction=1.0, file_weights={})
    return source, open_source(*job.held_out, of_held_out, columns)


def _source_notes(source: TrainSource, held_out: TrainSource) -> Iterator[str]:
    yield (
        f"cache {source.folder.root} (root {source.manifest.root[:12]}…): "
        f"{source.train_rows:,} rows to learn from, {held_out.eval_rows:,} held out"
    )
    yield from source.notes
    if held_out is not source:
        yield from (f"{held_out.folder.root}: {note}" for note in held_out.notes)
    if held_out.eval_rows:
        yield from _overlap_notes(source, held_out)


def _overlap_notes(source: TrainSource, held_out: TrainSource) -> Iterator[str]:
    found = overlap(source, held_out)
    if held_out is source:
        yield (
            f"{found.held_out:,} prompts are held out by a hash that ignores white space, the "
            "system message, tools and template options."
        )
    elif found.shared:
        yield (
            f"{found.shared:,} of {found.held_out:,} prompts of {held_out.folder.root} are in the "
            "training data as well. Metrics measured on them say nothing about new prompts."
        )


def _text_config(policy: Policy) -> Any:
    return causal_model(policy.model).config.get_text_config(decoder=True)


def _restored(session: Session, start: Start) -> TrainingPosition | None:
    """The position of the checkpoint, its state loaded; None for a new run."""
    if start.checkpoint is None:
        return None
    position = start.checkpoint.position
    folder = start.folder.step(position.global_step)
    run_on_all_ranks(session.world, lambda: session.engine.load_state(folder))
    window = {name: Mean(*pair) for name, pair in position.window.items()}
    return TrainingPosition(
        position.global_step,
        position.cursor,
        position.memory,
        window,
        start.checkpoint.best_so_far,
    )


def _require_agreement(session: Session, records: RunRecords) -> None:
    """Requires a policy that begins as the reference to reproduce the log-probs of the cache."""
    job = session.job
    if session.recipe.head == "score":
        records.say("A reward model has no log-probs to compare with the reference's.")
        return
    if not job.begins_as_reference:
        records.say("The policy is not the reference of the cache: its log-probs are not compared.")
        return
    sample = run_on_all_ranks(
        session.world, lambda: list(sample_rows(job.cache, job.manifest, SAMPLED_ROWS))
    )
    is_packed = job.config.lora.quantize != "none"
    gap = largest_gap(
        session.engine,
        sample,
        job.manifest.fingerprint["model.dtype"],
        session.policy.dtype,
        may_differ=is_packed,
    )
    records.agreed(gap, is_packed=is_packed)


def _learn(
    session: Session, start: Start, records: RunRecords, position: TrainingPosition
) -> Trained:
    deadline = start.began + session.job.max_seconds
    position = replace(position, fits=start.fits(planned_by(session)))
    loop = Loop(
        engine=session.engine,
        recipe=session.recipe,
        feed=session.feed,
        options=session.job.config.train,
        meter=Meter(pads=session.feed.settings.pads),
        backoff=_memory_backoff(session, position.fits),
    )
    with asked_to_stop() as asked:
        records.begin(position, loop.total_steps)
        position, ending = train(
            loop,
            start=position,
            records=records,
            conditions=StopConditions(asked, deadline, SaveClock(60 * loop.options.save_minutes)),
            is_measured=records.is_evaluated,
        )
    reason, model_step = "", None
    if ending == "finished":
        if reason := loop.why_early(position):
            records.say(f"finished after {position.step:,} of {loop.total_steps:,} steps: {reason}")
        model = chosen_model(session, start, records, position)
        write_model(session, start, records, model)
        records.finish(model.step)
        model_step = None if model.step == position.step else model.step
    records.ended(ending, reason=reason, model_step=model_step)
    signs = records.report()
    if ending == "signal":
        raise Interrupted(asked.signal_number or 15, at=stopped_at(start.folder, position.step))
    return outcome(start.folder, ending, signs)


def _memory_backoff(session: Session, fits: int) -> MemoryBackoff:
    ranks, stage = session.world.size, stage_of(session.engine_config)
    feed = session.feed
    device = session.policy.device.type
    tokens = feed.settings.tokens_per_batch
    is_able = can_recompute(causal_model(session.policy.model))
    now = Situation(session.job.config, stage, ranks, tokens, device, is_able)
    return MemoryBackoff(
        pads=feed.settings.pads,
        ranks=ranks,
        advice=tuple(memory_savers(now)),
        budget=fits,
    )


def stopped_at(folder: RunFolder, step: int) -> str:
    """The step of an interrupted run and its checkpoint, as a part of a sentence."""
    saved = folder.latest_step()
    if saved is None:
        return f" at step {step:,}, without a checkpoint"
    what = "checkpoint saved in" if saved == step else "which is not saved; the last checkpoint is"
    return f" at step {step:,}, {what} {folder.step(saved)}"
