"""Checks a training's settings before any slow work, and holds the state of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.batches import World
from ...schemas.cache import Manifest
from ...schemas.checkpoint import Checkpoint, FittedBatches
from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError
from ...schemas.train_options import TrainOptions
from ...stages.engine.deepspeed_config import EngineContext, engine_config, stage_of
from ...stages.feed.select import ReadSpec
from ...stages.methods.objective import Objective
from ...stages.model.model_folder import (
    UNUSED_WEIGHTS,
    ModelFiles,
    require_peft,
    stored_dtype,
)
from ...stages.storage.cache import Cache
from ...stages.storage.locations import is_remote
from ...stages.storage.run.run_folder import RunFolder, run_folder_of
from ...stages.tracking.metrics_log import Callback
from ...stages.train.patience import best_of_sets
from ...stages.train.together import StopConditions
from ..jobs.object_inputs import cache_at, local_model
from ..options.first_checks import asked_objective
from ..options.settings import Settings
from ..plan.cache_checks import (
    held_out_caches,
    read_spec_of,
    require_logps,
    require_own_samples,
    require_same_making,
    require_same_text,
)
from ..plan.setting_checks import (
    require_effect,
    require_margins,
    require_quantizable,
    seconds_of,
    with_adapters_settings,
)
from ..plan.workload import planned_tokens

if TYPE_CHECKING:
    from ...stages.engine.deepspeed_engine import DeepSpeedEngine
    from ...stages.feed.loader import CacheFeed
    from ...stages.feed.train_source import TrainSource
    from ...stages.model.policy import Policy
    from ...stages.storage.run.run_remote import RunRemote
    from ...stages.train.memory import MemoryBackoff
    from ...stages.train.together import Meter
    from .records import RunRecords


@dataclass(eq=False)
class Run:
    """A training on this rank, filled in from top to bottom: checked, joined, loaded."""

    # The request, from `check`.
    settings: Settings
    config: Config  # the settings; once loaded, with every `auto` decided
    asked: Objective  # the method with its options
    objective: Objective  # the same; once loaded, with every `auto` resolved
    read_spec: ReadSpec
    cache: Cache
    manifest: Manifest
    held_out: dict[str, tuple[Cache, Manifest]]  # other caches to evaluate on, by name
    begins_as: ModelOptions  # the model from which the policy starts
    folder: RunFolder
    remote: RunRemote | None  # where the folder is uploaded
    max_seconds: float
    callbacks: tuple[Callback, ...] = ()

    # Once the ranks have joined: `identify` of load.py, and `open_folder` of resume.py.
    world: World = field(init=False)
    files: ModelFiles = field(init=False)  # of the policy, with their versions when digested
    identity: Mapping[str, str] = field(init=False)  # their digests
    begins_as_reference: bool = field(init=False)
    began: float = 0.0  # on this rank's monotonic clock
    run_id: str = ""
    is_finished: bool = False  # no work is left
    checkpoint: Checkpoint | None = None  # to resume from
    changes: tuple[str, ...] = ()  # differences from the start of the run

    # `load` of load.py makes these.
    source: TrainSource = field(init=False)
    feed: CacheFeed = field(init=False)
    policy: Policy = field(init=False)
    engine: DeepSpeedEngine = field(init=False)
    engine_config: dict[str, Any] = field(init=False)  # DeepSpeed's, resolved
    memory: MemoryBackoff = field(init=False)
    meter: Meter = field(init=False)

    # During training.
    records: RunRecords = field(init=False)
    stop: StopConditions = field(default_factory=StopConditions)
    failures: int = 0  # steps in a row that were not finite

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps of the whole run, if nothing ends it early."""
        planned, most = self.feed.planned_steps, self.config.train.max_steps
        return min(planned, most) if most else planned

    def is_due(self, step: int, every: int) -> bool:
        """Whether this step is a multiple of `every`, or the last."""
        return step >= self.total_steps or (bool(every) and step % every == 0)

    @property
    def planned_tokens(self) -> int:
        """The planned tokens of a micro-batch."""
        return planned_tokens(self.config.train, self.policy.device.type)

    @property
    def fits(self) -> FittedBatches | None:
        """The micro-batch that fits, after memory ran out; None if it has not."""
        budget = self.memory.budget
        return FittedBatches(self.planned_tokens, budget) if budget else None


def check_settings(settings: Settings) -> Objective:
    """The objective; refuses settings that are wrong for any cache and policy."""
    train = settings.config.train
    objective = asked_objective(settings.config)
    seconds_of(train.max_time)
    require_effect(settings)
    if train.row_margins:
        require_margins(objective)
    return objective


def check(settings: Settings, callbacks: Iterable[Callback] = ()) -> Run:
    """Checks everything that a user can get wrong before any slow work."""
    config, train = settings.config, settings.config.train
    objective = check_settings(settings)
    remote = None
    if is_remote(train.output):
        from ...stages.storage.run.run_remote import run_remote_of  # noqa: PLC0415 - only a bucket

        remote = run_remote_of(train.output)
        if train.resume == "auto":
            remote.pull()
        else:
            remote.require_new()
    cache = cache_at(train.cache or config.cache.output)
    manifest = cache.manifest()
    adapter = "" if train.model else local_model(manifest.adapter)
    config = with_adapters_settings(settings, objective, adapter)
    policy = _policy_options(config, manifest, adapter)
    stage = zero_stage(train, policy)
    require_quantizable(train, config.lora, stage)
    held_out = checked_caches(objective, train, cache)
    train = replace(train, best=best_of_sets(train.best, [*held_out]))
    read_spec = read_spec_of(objective, train, policy.path)
    given = {name: str(value) for name, value in settings.given("tokens").items()}
    require_same_text(manifest, policy.path, config.tokens, given)
    return Run(
        settings=settings,
        config=replace(config, train=train),
        asked=objective,
        objective=objective,
        read_spec=read_spec,
        cache=cache,
        manifest=manifest,
        held_out=held_out,
        begins_as=policy,
        folder=run_folder_of(train.output),
        remote=remote,
        max_seconds=seconds_of(train.max_time),
        callbacks=tuple(callbacks),
    )


def checked_caches(
    objective: Objective, train: TrainOptions, cache: Cache
) -> dict[str, tuple[Cache, Manifest]]:
    """The caches to evaluate on, by name; refuses one that does not fit the method or the cache."""
    manifest, held_out = cache.manifest(), held_out_caches(train)
    for name, path in train.eval_caches:
        require_same_making(manifest, held_out[name][1], path)
    for folder, made in ((cache, manifest), *held_out.values()):
        require_logps(objective, folder, made)
        may_differ = train.other_sampling
        require_own_samples(objective, folder.root, made.sampling, may_differ=may_differ)
    return held_out


def zero_stage(train: TrainOptions, policy: ModelOptions) -> int:
    """The ZeRO stage; refuses settings that DeepSpeed supports with no policy or ranks."""
    dtype = stored_dtype(policy.path) if train.dtype == "auto" else train.dtype
    context = EngineContext(dtype, hidden_size=1, world_size=1)
    return int(stage_of(engine_config(train, context)))


def _policy_options(config: Config, manifest: Manifest, adapter: str) -> ModelOptions:
    """The named folder, or the cache's reference with its adapter."""
    named = config.train.model
    if config.lora.enabled or adapter:
        require_peft()
    path = local_model(named or manifest.model)
    if not Path(path).is_dir():
        what = "no such model folder" if named else "the cache's reference is missing"
        raise UsageError(f"{named or manifest.model}: {what}. Pass the policy by --model DIR.")
    options = replace(config.model, path=path, adapter="", device_map="")
    if named:
        return options
    lacks = config.model.allow_unused_weights or UNUSED_WEIGHTS in manifest.fingerprint
    return replace(options, adapter=adapter, allow_unused_weights=lacks)
