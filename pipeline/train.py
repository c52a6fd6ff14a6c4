"""Stage 2 in order: meet, read lengths, load the policy, check it, learn, save the model."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..schemas.batches import Cursor
from ..schemas.errors import Interrupted
from ..stages.engine.deepspeed_engine import open_engine
from ..stages.engine.launch import joined_world
from ..stages.engine.peers import together
from ..stages.feed.feed import CacheFeed
from ..stages.feed.settings import FeedSettings
from ..stages.feed.source import open_source
from ..stages.model.logps import causal_model
from ..stages.model.policy import load_policy
from ..stages.storage.sample import sample_rows
from ..stages.train.agreement import largest_gap
from ..stages.train.loop import Halts, Loop, Place, train
from ..stages.train.meter import Meter
from .halting import asked_to_stop, naming_the_way_on
from .lost_peers import naming_lost_peers
from .model_folder import write_model
from .run_records import RunRecords, open_records
from .run_start import Start, started
from .session import Session
from .trained import Trained, outcome

if TYPE_CHECKING:
    from ..schemas.engine import World
    from ..schemas.tracking import Progress
    from ..stages.feed.source import TrainSource
    from ..stages.methods.recipe import Recipe
    from ..stages.model.policy import Policy
    from .training_job import TrainingJob

logger = logging.getLogger("align")

SAMPLED_ROWS = 8
# A GPU wants large products. On a CPU more tokens at once are no faster and only take memory.
TOKENS_PER_BATCH = {"cuda": 16_384, "cpu": 2048}


def run_training(job: TrainingJob, *, progress: Progress) -> Trained:
    """Trains a policy, or goes on with a run that was stopped; returns what came of it."""
    with joined_world() as world:
        return train_in(job, world, progress=progress)


def train_in(job: TrainingJob, world: World, *, progress: Progress) -> Trained:
    """Like `run_training`, among ranks that have met already."""
    with naming_the_way_on(), naming_lost_peers(world), started(job, world) as start:
        if start.is_finished:
            return replace(outcome(start.folder, "finished"), is_old=True)
        session = open_session(job, world, progress)
        with open_records(session, start, progress) as records:
            place = _restored(session, start)
            if place is None:
                _require_agreement(session, records)
                place = Place(0, Cursor(0, 0))
            return _learn(session, start, records, place)


def open_session(job: TrainingJob, world: World, progress: Progress) -> Session:
    """Reads what there is to learn from, then loads the policy: one copy, and nothing beside it."""
    config = job.config
    source, held_out = together(world, lambda: _sources(job, world))
    recipe, advice = job.recipe.settled(source.labels)
    for note in (_told_of(source, held_out), *source.notes, *advice):
        progress.say(note)
    policy = together(world, lambda: load_policy(job.policy, config.train, config.lora))
    engine, engine_config = open_engine(
        policy, config.train, world, hidden_size=_text_config(policy).hidden_size
    )
    settings = _feed_settings(job, recipe, world, policy)
    return Session(
        job=job,
        world=world,
        policy=policy,
        engine=engine,
        engine_config=engine_config,
        source=source,
        recipe=recipe,
        feed=CacheFeed(source, held_out, settings),
    )


def _sources(job: TrainingJob, world: World) -> tuple[TrainSource, TrainSource]:
    """The rows to learn from, and those to be measured by: held out of them, or another cache."""
    recipe, first_here = job.recipe, world.local_rank == 0
    source = open_source(
        job.cache,
        job.manifest,
        rows=recipe.rows,
        mismatched="mismatched" in recipe.needs,
        eval_fraction=job.config.train.eval_fraction,
        checks_bytes=first_here,
    )
    if job.held_out is None:
        return source, source
    folder, manifest = job.held_out
    return source, open_source(
        folder,
        manifest,
        rows=recipe.rows,
        mismatched="mismatched" in recipe.needs,
        eval_fraction=1.0,
        checks_bytes=first_here,
    )


def _told_of(source: TrainSource, held_out: TrainSource) -> str:
    return (
        f"cache {source.folder.root} (root {source.manifest.root[:12]}…): "
        f"{source.train_rows:,} rows to learn from, {held_out.eval_rows:,} held out"
    )


def _feed_settings(job: TrainingJob, recipe: Recipe, world: World, policy: Policy) -> FeedSettings:
    train = job.config.train
    return FeedSettings(
        seed=train.seed,
        epochs=train.epochs,
        batch_size=train.batch_size,
        kl_use=recipe.option("kl_use", "rotate"),
        kl_per_step=recipe.option("kl_per_step", 0),
        limit_train_batches=train.limit_train_batches,
        limit_eval_batches=train.limit_eval_batches,
        tokens_per_batch=train.tokens_per_batch or TOKENS_PER_BATCH[policy.device.type],
        pads=policy.path.layout != "packed",
        world=world,
    )


def _text_config(policy: Policy) -> Any:
    return causal_model(policy.model).config.get_text_config(decoder=True)


def _restored(session: Session, start: Start) -> Place | None:
    """Where the checkpoint left off, its state loaded; None for a new run."""
    if start.checkpoint is None:
        return None
    position = start.checkpoint.position
    folder = start.folder.step(position.global_step)
    together(session.world, lambda: session.engine.load_state(folder))
    return Place(position.global_step, position.cursor, position.memory)


def _require_agreement(session: Session, records: RunRecords) -> None:
    """The policy, where it begins as the reference, has to give the numbers of the cache."""
    job = session.job
    if not job.begins_as_reference:
        records.say("The policy is not the reference of the cache: its log-probs are not compared.")
        return
    gap = largest_gap(
        session.engine,
        sample_rows(job.cache, job.manifest, SAMPLED_ROWS),
        job.manifest.fingerprint["model.dtype"],
        str(causal_model(session.policy.model).dtype).removeprefix("torch."),
    )
    records.agreed(gap)


def _learn(session: Session, start: Start, records: RunRecords, place: Place) -> Trained:
    deadline = start.began + session.job.max_seconds
    loop = Loop(
        engine=session.engine,
        recipe=session.recipe,
        feed=session.feed,
        options=session.job.config.train,
        meter=Meter(pads=session.feed.settings.pads),
    )
    with asked_to_stop() as asked:
        records.begin(place, loop.total_steps)
        place, ending = train(loop, start=place, records=records, halts=Halts(asked, deadline))
    if ending == "signal":
        raise Interrupted(asked.signal_number or 15)
    if ending == "finished":
        write_model(session, start, records, steps=place.step)
        records.finish(place)
    return outcome(start.folder, ending)
