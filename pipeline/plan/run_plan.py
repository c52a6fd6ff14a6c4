"""The plan of a training: what it runs over, what it needs of a GPU, and how long it takes.

From the settings, a cache's lengths or given ones, and config.json; no weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path

from ...schemas.batches import World
from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError
from ...schemas.train_options import TrainOptions
from ...stages.engine.engine_memory import Elements
from ...stages.methods.recipe import Recipe
from ...stages.methods.table import recipe_of
from ...stages.model.loading.folder_check import require_peft
from ...stages.model.loading.load import DTYPES
from ...stages.model.loading.placement import chosen_device
from ...stages.storage.run.run_store import run_folder_of
from ...stages.tracking.journal import entry_batches
from ..options.settings import Settings
from .fitted_batches import planned_tokens
from .memory_plan import Components, MemoryPlanner, Planned, Way
from .memory_search import Tried, search
from .planned_rows import GivenRows, PlannedRows, known_dtype, planned_rows
from .remedies import Attempt, Situation, changed
from .scoring_plan import Scoring
from .setting_checks import learning_rate_note, require_effect
from .workload import Workload, feed_settings, workload_of

USABLE = 0.93  # of a GPU: CUDA's own memory and gaps between tensors take the rest


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
class ReferenceCost:
    """Extra memory of a trainer that keeps the reference beside the policy."""

    copy: int  # bytes of its weights; none with an adapter, which can be switched off
    logits: int  # bytes of logits and their gradient, without a fused head


@dataclass(frozen=True)
class RunPlan:
    """A training that has not begun."""

    method: str
    policy: str
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

    @property
    def dtype(self) -> str:
        """The dtype of the policy's weights."""
        return self.planner.planned.dtype

    @property
    def device(self) -> str:
        """The kind of device that is planned for."""
        return self.planner.planned.device

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
    config, recipe = settings.config, _recipe(settings)
    device = "cuda" if request.is_for_gpu else chosen_device(config.model)
    rows = planned_rows(config, recipe, request.rows, device)
    _require_dealt(request.gpus, config.train.sequence_parallel)
    work_of = cache(partial(_workload, rows, recipe, request.gpus, device))
    workload = work_of(config.train)
    planner = _planner(config, recipe, rows.policy, workload, device=device, ranks=request.gpus)

    def planner_of(other: Config) -> MemoryPlanner:
        work = work_of(other.train)
        return planner.changed(other.train, other.lora, work.trees(), work.micro_batches)

    own = planner.own_way
    as_given = Tried(Attempt((), ({},)), {}, own, planner.components(own))
    is_small = 0 < request.usable_bytes < as_given.components.peak
    remedy = _remedy(config, request, workload, planner_of, as_given) if is_small else None
    advised = changed(config, remedy.changes) if remedy else config
    origins = settings.origins.items()
    return RunPlan(
        method=recipe.name,
        policy=rows.policy.path,
        own_way=own,
        elements=planner.elements(own.learning),
        workload=workload,
        scoring=rows.scoring,
        reference=_reference(planner, own, workload),
        planner=planner,
        own=as_given.components,
        request=request,
        remedy=remedy,
        given_by_set=frozenset(name for name, origin in origins if origin == "--set"),
        note=learning_rate_note(advised.train, advised.lora),
    )


def _recipe(settings: Settings) -> Recipe:
    config = settings.config
    if not config.train.method:
        raise UsageError("No method. Pass --method kto (or dpo, orpo, …; `align methods`).")
    require_effect(settings)
    if config.lora.enabled:
        require_peft()
    return recipe_of(config.train.method, config.method)


def _planner(
    config: Config,
    recipe: Recipe,
    policy: ModelOptions,
    workload: Workload,
    *,
    device: str,
    ranks: int,
) -> MemoryPlanner:
    return MemoryPlanner(
        Planned(
            policy,
            config.train,
            config.lora,
            dtype=known_dtype(policy.path, config.train.dtype),
            device=device,
            ranks=ranks,
            head=recipe.head,
            layout="flex" if device == "cuda" else "packed",
            trees=workload.trees(),
            micro_batches=workload.micro_batches,
        )
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
    rows: PlannedRows, recipe: Recipe, ranks: int, device: str, train: TrainOptions
) -> Workload:
    world = World(0, ranks, 0, train.sequence_parallel)
    tokens = planned_tokens(train, device)
    feed = feed_settings(train, recipe, world, tokens=tokens, pads=False)
    return workload_of(rows.table, feed, train, rows=rows.count, held_out=rows.held_out)


def _reference(planner: MemoryPlanner, way: Way, workload: Workload) -> ReferenceCost:
    planned, total = planner.planned, planner.elements("full").total
    itemsize = DTYPES[planned.dtype].itemsize
    share = planned.ranks if planner.setting(way).stage == 3 else 1
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
