"""A training run: its checked settings before weights are loaded, and its parts after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...schemas.batches import Engine, World
from ...schemas.cache import Manifest
from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError
from ...schemas.train_options import TrainOptions
from ...stages.engine.deepspeed_config import EngineContext, engine_config, stage_of
from ...stages.feed.conversions import ReadSpec
from ...stages.feed.loader import CacheFeed
from ...stages.feed.train_source import TrainSource
from ...stages.methods.recipe import Recipe
from ...stages.model.loading.model_folder import (
    UNUSED_WEIGHTS,
    ModelFiles,
    require_peft,
    stored_dtype,
)
from ...stages.model.policy import Policy
from ...stages.storage.cache.cache_folder import CacheFolder
from ...stages.storage.cache.manifest_file import load_manifest
from ...stages.storage.run.run_remote import run_remote_of
from ...stages.tracking.journal import Callback
from ..jobs.object_inputs import cache_at, local_model
from ..options.first_checks import asked_recipe
from ..options.settings import Settings
from ..plan.best_metric import require_measured
from ..plan.cache_checks import require_same_making, require_same_text
from ..plan.method_needs import read_spec_of, require_own_samples, require_token_logps
from ..plan.setting_checks import (
    require_compilable,
    require_effect,
    require_margins,
    require_packable,
    require_writing,
    seconds_of,
)


@dataclass(frozen=True)
class TrainingJob:
    """Everything known before ranks join; `PolicyDigests` fills in the last three fields."""

    config: Config
    recipe: Recipe  # its `auto` is not resolved yet
    read_spec: ReadSpec
    cache: CacheFolder
    manifest: Manifest
    held_out: tuple[CacheFolder, Manifest] | None
    policy: ModelOptions
    settings: Settings
    max_seconds: float
    callbacks: tuple[Callback, ...] = ()
    policy_identity: Mapping[str, str] = field(default_factory=dict)  # digests of its files
    policy_files: ModelFiles = field(default_factory=lambda: ModelFiles({}))  # as they were then
    begins_as_reference: bool = False

    def zero_stage(self, world_size: int) -> int:
        """The ZeRO stage for this many ranks."""
        return _zero_stage(self.config.train, self.policy, world_size)


def open_training(settings: Settings) -> TrainingJob:
    """Checks everything that a user can get wrong before any slow work."""
    recipe = recipe_asked_for(settings)
    config, train = settings.config, settings.config.train
    if remote := run_remote_of(train.output):
        if train.resume == "auto":
            remote.pull()
        else:
            remote.require_new()
    cache = cache_at(train.cache or config.cache.output)
    manifest = load_manifest(cache)
    policy = _policy(settings, manifest)
    zero_stage = _zero_stage(train, policy, world_size=1)
    require_packable(train, config.lora, zero_stage)
    require_compilable(config, zero_stage)
    held_out = _held_out(config, manifest)
    for folder, made in ((cache, manifest), *([held_out] if held_out else [])):
        require_token_logps(recipe, folder, made)
        may_differ = train.other_sampling
        require_own_samples(recipe, folder.root, made.sampling, may_differ=may_differ)
    read_spec = read_spec_of(recipe, train, policy.path)
    given = {name: str(value) for name, value in settings.given("tokens").items()}
    require_same_text(manifest, policy.path, config.tokens, given)
    return TrainingJob(
        config=config,
        recipe=recipe,
        read_spec=read_spec,
        cache=cache,
        manifest=manifest,
        held_out=held_out,
        policy=policy,
        settings=settings,
        max_seconds=seconds_of(train.max_time, name="train.max_time"),
    )


def recipe_asked_for(settings: Settings) -> Recipe:
    """The recipe; refuses what is known to be wrong without the cache and the policy."""
    config, train = settings.config, settings.config.train
    recipe = asked_recipe(config)
    seconds_of(train.max_time, name="train.max_time")
    require_effect(settings)
    require_measured(train)
    if train.row_margins:
        require_margins(recipe)
    if train.answers:
        require_writing(recipe)
    return recipe


def _zero_stage(train: TrainOptions, policy: ModelOptions, world_size: int) -> int:
    """Refuses what DeepSpeed cannot do with any policy on any number of ranks."""
    dtype = stored_dtype(policy.path) if train.dtype == "auto" else train.dtype
    config = engine_config(train, EngineContext(dtype, hidden_size=1, world_size=world_size))
    return int(stage_of(config))


def _policy(settings: Settings, manifest: Manifest) -> ModelOptions:
    """The folder the user names, or the reference of the cache, its adapter included."""
    config, train = settings.config, settings.config.train
    if config.lora.enabled or manifest.adapter:
        require_peft()
    if train.model:
        path = local_model(train.model)
        if not Path(path).is_dir():
            raise UsageError(
                f"{train.model}: no such model folder. Pass the policy by --model DIR."
            )
        return replace(config.model, path=path, adapter="", device_map="")
    if config.lora.enabled and manifest.adapter:
        raise UsageError(
            f"The reference is {manifest.model} with the adapter {manifest.adapter}: a new "
            "adapter on top of both could not be loaded by others. Merge them first, and make the "
            "cache with the merged model."
        )
    path = local_model(manifest.model)
    if not Path(path).is_dir():
        raise UsageError(
            f"{manifest.model}, the reference of the cache, is not there. Pass the policy by "
            "--model DIR."
        )
    return replace(
        config.model,
        path=path,
        adapter=local_model(manifest.adapter),
        device_map="",
        allow_unused_weights=config.model.allow_unused_weights
        or UNUSED_WEIGHTS in manifest.fingerprint,
    )


def _held_out(config: Config, manifest: Manifest) -> tuple[CacheFolder, Manifest] | None:
    """A second cache to evaluate on, made by the same reference from the same kind of ids."""
    name = config.train.eval_cache
    if not name:
        return None
    folder = cache_at(name)
    other = load_manifest(folder)
    require_same_making(manifest, other, name)
    return folder, other


@dataclass(frozen=True)
class Session:
    """A running training on one rank: policy, engine, data and method."""

    job: TrainingJob
    world: World
    policy: Policy
    engine: Engine
    engine_config: dict[str, Any]  # DeepSpeed's, resolved
    source: TrainSource
    recipe: Recipe
    feed: CacheFeed
