"""Opens a checked training: digests the policy, indexes the rows, loads policy and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from ...schemas.batches import World
from ...schemas.config import Config
from ...schemas.errors import FingerprintError
from ...schemas.file_version import Remember
from ...stages.engine.deepspeed_config import EngineContext, loading_config
from ...stages.engine.deepspeed_engine import open_engine
from ...stages.engine.distributed import agreed, gathered, run_on_all_ranks
from ...stages.engine.freed_blocks import giving_more_blocks_back
from ...stages.feed.cache_index import ShardColumns, unchecked
from ...stages.feed.loader import CacheFeed
from ...stages.feed.train_source import TrainSource, held_out_sources, open_source, overlap
from ...stages.model.adapters import adapts_experts
from ...stages.model.load import chosen_device, device_bytes, load_model, resolve
from ...stages.model.logprobs import causal_model
from ...stages.model.model_folder import ModelFiles, model_identity
from ...stages.model.policy import Policy, load_policy, stored_value_head
from ...stages.model.transformers_compat import routers_of
from ...stages.storage.cache import Cache
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.locations import HUB, origin_of
from ...stages.tracking.progress import Progress
from ...stages.train.memory import MemoryBackoff, forget_peak
from ...stages.train.together import Meter
from ..jobs.object_inputs import local_options
from ..plan.cache_checks import (
    named_elsewhere,
    require_positions,
    require_same_model,
    require_same_reference,
    sampling_note,
)
from ..plan.setting_checks import learning_rate_note
from ..plan.workload import feed_settings, short_plan
from .resume import resumed_preset
from .setup import Run


def identify(run: Run, world: World) -> None:
    """Digests the policy, and refuses another model than the cache's reference.

    The first rank of each machine digests, because a machine may have its own copy.
    """
    run.world = world
    other = None if run.config.train.model else named_elsewhere(run.settings, run.manifest)
    models = [run.begins_as, *([local_options(other)] if other else [])]
    remember = own_digests()
    run.files = run_on_all_ranks(world, lambda: ModelFiles.of(run.begins_as))
    mine = models if world.is_first_here else []
    found = gathered(
        world,
        run_on_all_ranks(world, lambda: [model_identity(model, remember) for model in mine]),
    )
    policy, *others = one_for_all(found, [model.path for model in models])
    # Each rank resolved revisions of the Hub by itself.
    read = [origin_of(path) for model in models for path in (model.path, model.adapter)]
    addresses = gathered(world, [one for one in read if one.startswith(HUB)])
    if other_rank := next((one for one in addresses if one != addresses[0]), None):
        raise FingerprintError(
            f"The ranks read different commits: {', '.join(addresses[0])}, and "
            f"{', '.join(other_rank)}. Name one of them as the revision."
        )
    if other:
        require_same_model(run.settings, run.manifest, models[1], others[0])
    may_differ = run.config.train.other_reference or "reference" not in run.objective.needs
    run.identity = policy
    run.begins_as_reference = require_same_reference(
        run.manifest, run.begins_as.path, policy, may_differ=may_differ
    )


def one_for_all(
    found: Sequence[Sequence[Mapping[str, str]]], paths: Sequence[str]
) -> Sequence[Mapping[str, str]]:
    """The first rank's digests of the models; refuses a machine whose copy differs."""
    for rank, others in enumerate(found):
        for path, first, identity in zip(paths, found[0], others, strict=False):
            if differing := [name for name in first if identity[name] != first[name]]:
                raise FingerprintError(
                    f"{path} on the machine of rank {rank} differs from rank 0's: "
                    f"{', '.join(differing)}. Copy the folder to every machine again."
                )
    return found[0]


def load(run: Run, progress: Progress, *, learns: bool = True) -> None:
    """Indexes the rows, decides every `auto`, loads the policy, and opens engine and feed.

    A policy that does not learn takes the memory of inference.
    """
    forget_peak()
    world, config = run.world, run.config
    run.source, held_out = run_on_all_ranks(world, lambda: _sources(run))
    run.objective, advice = run.objective.resolve_auto(run.source.labels)
    adapter = config.lora.continued(run.begins_as.adapter)
    if world.rank == 0:
        head = stored_value_head(run.begins_as) if run.objective.head == "values" else None
        notes = [
            *source_notes(run.source, held_out),
            sampling_note(run.objective, run.manifest),
            learning_rate_note(config.train, config.lora),
            f"the value head starts from {head}" if head else "",
            f"training continues the adapter {adapter}" if adapter else "",
            *advice,
        ]
        for note in filter(None, notes):
            progress.log(note)
    config = run.config = with_auto_decided(run, progress) if learns else config
    policy = run.policy = run_on_all_ranks(world, lambda: _load_policy(run))
    model = causal_model(policy.model)
    text_config = model.config.get_text_config(decoder=True)
    is_mixture = bool(routers_of(model))
    is_new = config.lora.enabled and not adapter
    if world.rank == 0 and is_new and is_mixture and not adapts_experts(policy.model):
        progress.log(
            "The adapter does not change the experts: add their layers to lora.targets, such as "
            "experts.gate_up_proj and experts.down_proj, to train them."
        )
    last = getattr(text_config, "max_position_embeddings", None)
    for source in (run.source, *held_out.values()):
        require_positions(source, run.objective, last)
    run.objective = run.objective.computed_in(policy.dtype, run.manifest.fingerprint["model.dtype"])
    options = config.train if learns else None
    run.engine, run.engine_config = open_engine(
        policy, options, world, hidden_size=text_config.hidden_size
    )
    if policy.is_sharded:
        policy.choose_path(partial(agreed, world))

    planned, fits = run.planned_tokens, 0
    known = run.checkpoint.state.fits if run.checkpoint else None
    if known and known.planned == planned:  # another requested size is tried again
        fits = known.fits
        progress.log(
            f"memory ran out before with {planned:,} tokens per batch, so {fits:,} are used; to "
            "try another number, pass --tokens-per-batch."
        )
    pads = not policy.path.packs
    settings = feed_settings(config.train, run.objective, world, tokens=fits or planned, pads=pads)
    run.feed = CacheFeed(run.source, held_out, settings)

    run.memory = MemoryBackoff(pads, ranks=world.size, budget=fits)
    run.meter = Meter(pads=pads)
    if world.rank == 0 and learns:
        for line in short_plan(run.feed, policy, config.train, run.engine_config):
            progress.log(line)


def with_auto_decided(run: Run, progress: Progress) -> Config:
    """The settings with every `auto` decided, the same on every rank.

    A plan decides if memory has a limit, on a GPU or by train.memory.
    """
    config, world = run.config, run.world
    resumed = resumed_preset(run.checkpoint.identity) if run.checkpoint else ""
    if resumed and config.train.deepspeed == "auto":
        config = replace(config, train=replace(config.train, deepspeed=resumed))
    device = chosen_device(run.begins_as)
    # GPUs may differ: all ranks choose for the smallest.
    smallest = min(gathered(world, device_bytes(device)))
    if not (smallest or config.train.memory):
        train = replace(
            config.train,
            gradient_checkpointing=config.train.recomputes,
            checkpoint_offload=config.train.offloads_inputs,
        )
        return replace(config, train=train)
    from .memory_at_start import chosen_to_fit, facts_of_run  # noqa: PLC0415 - only for a plan

    return chosen_to_fit(config, facts_of_run(run, device, smallest, resumed), world, progress)


def _sources(run: Run) -> tuple[TrainSource, dict[str, TrainSource]]:
    """The training rows, and the evaluation rows by set, held out or from other caches."""
    columns = shard_columns(run.world, own_digests())
    source = open_source(run.cache, run.manifest, run.read_spec, columns)
    return source, held_out_sources(source, run.held_out)


def shard_columns(world: World, remember: Remember) -> ShardColumns:
    """A reader of shard columns; only the first rank of each machine checks the shards."""
    check = partial(Cache.check, remember=remember) if world.is_first_here else unchecked
    return ShardColumns(check)


def source_notes(source: TrainSource, held_out: Mapping[str, TrainSource]) -> Iterator[str]:
    """Notes on the rows of a training and its evaluations."""
    rows = sum(one.eval_rows for one in held_out.values())
    yield (
        f"cache {source.folder.root} ({source.manifest.root[:12]}…): "
        f"{source.train_rows:,} training rows, {rows:,} held out"
    )
    yield from source.notes
    for one in held_out.values():
        if one is not source:
            yield from (f"{one.folder.root}: {note}" for note in one.notes)
        if not one.eval_rows:
            continue
        prompts, shared = overlap(source, one)
        if one is source:
            yield (
                f"{prompts:,} prompts are held out by a hash that ignores white space, the "
                "system message, tools and template options."
            )
        elif shared:
            yield (
                f"{shared:,} of {prompts:,} prompts of {one.folder.root} are also training "
                "prompts. Remove them: metrics on them do not measure new prompts."
            )


def _load_policy(run: Run) -> Policy:
    """The policy, without a reference; under ZeRO-3 no rank ever holds all of it."""
    train, world = run.config.train, run.world
    load_weights: Callable[..., Any] = load_model
    found = resolve(replace(run.begins_as, dtype=train.dtype))
    context = EngineContext(found.dtype, found.hidden_size, world.size)
    if zero3 := loading_config(train, world, context):
        # Slow to import, and used only here.
        from ...stages.model.sharded_load import load_sharded  # noqa: PLC0415

        together = partial(run_on_all_ranks, world)
        later = run.config.lora.continued(run.begins_as.adapter)
        load_weights = partial(load_sharded, config=zero3, together=together, later=later)
    with giving_more_blocks_back() if zero3 else nullcontext():
        policy = load_policy(
            run.begins_as,
            train,
            run.config.lora,
            head=run.objective.head,
            collision_logps="collision_logps" in run.objective.needs,
            load=load_weights,
        )
    run.files.require_unchanged()  # since their digests were computed
    return policy
