"""The plan of a training: what it runs over, what it needs of a GPU, and how long it takes.

From the settings, a cache's lengths or given ones, and config.json; no weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path

from ...schemas.batches import World
from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError
from ...schemas.train_options import TrainOptions
from ...stages.engine.engine_memory import Elements
from ...stages.feed.cache_index import RowTable, ShardColumns, unchecked
from ...stages.feed.train_source import open_source
from ...stages.methods.recipe import Recipe
from ...stages.methods.table import recipe_of
from ...stages.model.loading.folder_check import require_peft
from ...stages.model.loading.load import DTYPES
from ...stages.model.loading.model_folder import model_config, stored_dtype
from ...stages.model.loading.placement import chosen_device
from ...stages.storage.bucket.objects import location
from ...stages.storage.cache.cache_folder import CacheFolder
from ...stages.storage.cache.manifest_file import load_manifest
from ...stages.storage.run.run_store import run_folder_of
from ...stages.tracking.journal import entry_batches
from ..jobs.object_inputs import local_model
from ..options.settings import Settings
from .fitted_batches import planned_tokens
from .memory_plan import Components, MemoryPlanner, Planned, Way
from .memory_search import Tried, search
from .remedies import Attempt, Situation, changed
from .train_checks import learning_rate_note, read_spec_of, require_effect
from .workload import RowShape, Workload, even_rows, feed_settings, workload_of

USABLE = 0.93  # of a GPU: CUDA's own memory and gaps between tensors take the rest
MOST_MADE_ROWS = 100_000


@dataclass(frozen=True)
class GivenRows:
    """Rows that are not there yet: pairs of a prompt and two completions."""

    count: int
    prompt: int
    completion: int


@dataclass(frozen=True)
class PlanRequest:
    """The command's options besides the settings."""

    gpu_bytes: int = 0
    gpus: int = 1
    is_for_gpu: bool = False
    rows: GivenRows | None = None
    tokens_per_second: float = 0.0  # of all GPUs together
    price: float = 0.0  # of a GPU for an hour

    @property
    def usable_bytes(self) -> int:
        """The part of a GPU's memory that a training can fill."""
        return int(USABLE * self.gpu_bytes)


@dataclass(frozen=True)
class Scoring:
    """Tokens that stage 1 runs the reference over."""

    own: int
    mismatched: int


@dataclass(frozen=True)
class ReferenceCost:
    """Extra memory of a trainer that keeps the reference beside the policy."""

    copy: int  # bytes of its weights; none with an adapter, which can be switched off
    logits: int  # bytes of logits and their gradient, without a fused head


@dataclass(frozen=True)
class RunPlan:
    """A training that has not begun."""

    method: str
    policy: str
    dtype: str
    device: str
    own_way: Way
    elements: Elements
    workload: Workload
    scoring: Scoring
    reference: ReferenceCost
    planner: MemoryPlanner
    own: Components  # what the settings need
    request: PlanRequest
    remedy: Tried | None  # if they do not fit: what does, or comes nearest
    given_by_set: frozenset[str]
    note: str  # on the learning rate; empty: none

    @cached_property
    def memory(self) -> tuple[tuple[Way, Components], ...]:
        """The memory of every way to train."""
        ways = [way for way in self.planner.ways() if self.planner.is_possible(way)]
        ways = ways if self.own_way in ways else [self.own_way, *ways]
        return tuple((way, self.planner.components(way)) for way in ways)

    @property
    def seconds(self) -> float:
        """The estimated seconds; 0 where the speed is unknown."""
        rate = self.request.tokens_per_second
        return self.workload.tokens / rate if rate else 0.0

    def fits(self, components: Components) -> bool:
        """Whether it fits a GPU of the size that was asked for."""
        return components.peak <= self.request.usable_bytes


def plan_run(settings: Settings, request: PlanRequest) -> RunPlan:
    """Plans the training of these settings."""
    config = settings.config
    if not config.train.method:
        raise UsageError("No method. Pass --method kto (or dpo, orpo, …; `align methods`).")
    require_effect(settings)
    if config.lora.enabled:
        require_peft()
    recipe = recipe_of(config.train.method, config.method)
    rows = _given(config, recipe, request.rows) if request.rows else _of_cache(config, recipe)
    dtype = _dtype(rows.policy.path, config.train.dtype)
    device = "cuda" if request.is_for_gpu else chosen_device(config.model)
    _require_dealt(request.gpus, config.train.sequence_parallel)
    work_of = cache(partial(_workload, rows, recipe, request.gpus, device))
    workload = work_of(config.train)
    planner = MemoryPlanner(
        Planned(
            rows.policy,
            config.train,
            config.lora,
            dtype=dtype,
            device=device,
            ranks=request.gpus,
            head=recipe.head,
            layout="flex" if device == "cuda" else "packed",
            trees=workload.trees(),
            micro_batches=workload.micro_batches,
        )
    )
    own = planner.own_way

    def planner_of(other: Config) -> MemoryPlanner:
        work = work_of(other.train)
        return planner.changed(other.train, other.lora, work.trees(), work.micro_batches)

    as_given = Tried(Attempt((), ({},)), {}, own, planner.components(own))
    is_small = 0 < request.usable_bytes < as_given.components.peak
    remedy = _remedy(config, request, workload, planner_of, as_given) if is_small else None
    advised = changed(config, remedy.changes) if remedy else config
    return RunPlan(
        method=recipe.name,
        policy=rows.policy.path,
        dtype=dtype,
        device=device,
        own_way=own,
        elements=planner.elements(own.learning),
        workload=workload,
        scoring=rows.scoring,
        reference=_reference(planner, own, workload, request.gpus, dtype),
        planner=planner,
        own=as_given.components,
        request=request,
        remedy=remedy,
        given_by_set=frozenset(
            name for name, origin in settings.origins.items() if origin == "--set"
        ),
        note=learning_rate_note(advised.train, advised.lora),
    )


def _require_dealt(ranks: int, sharing: int) -> None:
    if ranks % sharing:
        raise UsageError(
            f"train.sequence_parallel is {sharing}: --gpus has to be a multiple of it."
        )


def _remedy(
    config: Config,
    request: PlanRequest,
    work: Workload,
    planner_of: Callable[[Config], MemoryPlanner],
    as_given: Tried,
) -> Tried:
    now = Situation(
        config=config,
        stage=planner_of(config).setting(as_given.way).stage,
        ranks=request.gpus,
        tokens=work.micro_tokens // work.sharing,
        longest=work.longest,
    )
    return search(now, planner_of, request.usable_bytes, as_given)


def _workload(
    rows: _Rows, recipe: Recipe, ranks: int, device: str, train: TrainOptions
) -> Workload:
    world = World(0, ranks, 0, train.sequence_parallel)
    tokens = planned_tokens(train, device)
    feed = feed_settings(train, recipe, world, tokens=tokens, pads=False)
    return workload_of(rows.table, feed, train, rows=rows.count, held_out=rows.held_out)


@dataclass(frozen=True)
class _Rows:
    table: RowTable
    count: int
    held_out: int
    policy: ModelOptions
    scoring: Scoring


def _of_cache(config: Config, recipe: Recipe) -> _Rows:
    cache = CacheFolder(location(config.train.cache or config.cache.output))
    manifest = load_manifest(cache)
    path = local_model(config.train.model or manifest.model)
    read_spec = read_spec_of(recipe, config.train, path)
    index = open_source(cache, manifest, read_spec, ShardColumns(unchecked)).index
    sizes = [table.sizes for table in (index.train, index.held_out)]
    prompts = sum(int(one.prompt_tokens.sum(dtype="int64")) for one in sizes)
    completions = sum(int(one.own_tokens.sum(dtype="int64")) for one in sizes)
    return _Rows(
        table=index.train,
        count=len(index.train),
        held_out=len(index.held_out),
        policy=replace(config.model, path=path, adapter="", device_map="", tensor_parallel=1),
        scoring=Scoring(prompts + completions, index.num_partners * completions),
    )


def _given(config: Config, recipe: Recipe, rows: GivenRows) -> _Rows:
    path = config.train.model or config.model.path
    if not path:
        raise UsageError("No policy. Pass --model DIR: a folder with its config.json is enough.")
    branches = 1 if recipe.rows == "imitated" else 2
    shape = RowShape(rows.prompt, (rows.completion,) * branches)
    learned = round(rows.count * (1 - config.train.eval_fraction))
    num_pairs = config.cache.kl_pairs
    read = max(1, num_pairs) if "mismatched" in recipe.needs else 0
    stored = rows.prompt + 2 * rows.completion
    return _Rows(
        table=even_rows(max(1, min(learned, MOST_MADE_ROWS)), shape, num_partners=read),
        count=max(1, learned),
        held_out=rows.count - learned,
        policy=replace(config.model, path=local_model(path), adapter="", device_map=""),
        scoring=Scoring(rows.count * stored, rows.count * 2 * rows.completion * num_pairs),
    )


def _dtype(folder: str, asked: str) -> str:
    """The dtype of the settings, else of the weights, else of config.json."""
    if asked != "auto":
        return asked
    if any(Path(folder).glob("*.safetensors")):
        return stored_dtype(folder)
    config = model_config(folder)
    said = str(config.get("dtype") or config.get("torch_dtype") or "")
    if said not in DTYPES:
        raise UsageError(
            f"{folder}: neither weights nor config.json say the dtype. Pass --dtype bfloat16."
        )
    return said


def _reference(
    planner: MemoryPlanner, way: Way, workload: Workload, ranks: int, dtype: str
) -> ReferenceCost:
    itemsize, total = DTYPES[dtype].itemsize, planner.elements("full").total
    share = ranks if planner.setting(way).stage == 3 else 1
    trees = workload.trees()
    tokens = sum(len(tree.prompt) + len(one) for tree in trees for one in tree.branches)
    return ReferenceCost(
        copy=0 if way.learning != "full" else itemsize * total // share,
        logits=2 * itemsize * tokens * planner.vocabulary,
    )


def rate_of(run: Path) -> float:
    """Tokens per second of a run over all of its steps, as it logged them."""
    metrics = run_folder_of(str(run)).metrics
    if not metrics.is_file():
        raise UsageError(f"{run}: no run with a metrics.jsonl. Name the folder of a training run.")
    tokens = seconds = 0.0
    for entry in chain.from_iterable(entry_batches(metrics)):
        line = {point.key: point.value for point in entry.points}
        if "speed/tokens_per_second" in line:
            tokens += line["tokens"]
            seconds += line["speed/step_seconds"]
    if not seconds:
        raise UsageError(f"{metrics}: no step is in it. Name a run that has made some.")
    return tokens / seconds
