"""The plan of a training: what it runs over, and what it needs of a GPU.

From the settings, a cache's lengths or given ones, and config.json; no weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...stages.engine.engine_memory import Elements
from ...stages.methods.recipe import Recipe
from ...stages.methods.table import recipe_of
from ...stages.model.loading.load import DTYPES
from ...stages.model.loading.model_folder import require_peft
from ...stages.model.loading.placement import chosen_device, device_bytes
from ..options.settings import Settings
from .memory_choice import Budget, Choice, PlanFacts, chosen
from .memory_plan import Components, MemoryPlanner, Way
from .memory_search import Tried
from .planned_rows import GivenRows, PlannedRows, known_dtype, planned_rows
from .remedies import changed
from .setting_checks import learning_rate_note, require_effect
from .workload import Workload


@dataclass(frozen=True)
class PlanRequest:
    """The command's options besides the settings."""

    gpu_bytes: int = 0
    gpus: int = 1
    is_for_gpu: bool = False
    rows: GivenRows | None = None


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
    rows: PlannedRows
    reference: ReferenceCost
    planner: MemoryPlanner
    own: Components  # what the settings need
    choice: Choice  # of the settings that are `auto`
    request: PlanRequest
    given_by_set: frozenset[str]
    note: str  # on the learning rate; empty: none

    @property
    def remedy(self) -> Tried | None:
        """Where what was chosen does not fit: what does, or comes nearest."""
        return self.choice.remedy

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

    def fits(self, components: Components) -> bool:
        """Whether it fits into the memory that was asked for."""
        return self.choice.budget.holds(components)


def plan_run(settings: Settings, request: PlanRequest) -> RunPlan:
    """Plans the training of these settings."""
    asked, recipe = settings.config, _recipe(settings)
    device = "cuda" if request.is_for_gpu else chosen_device(asked.model)
    rows = planned_rows(asked, recipe, request.rows)
    here = 0 if request.is_for_gpu else device_bytes(device)
    request = replace(request, gpu_bytes=request.gpu_bytes or here)
    budget = Budget.of(asked.train, request.gpu_bytes)
    choice = chosen(asked, _facts(rows, recipe, asked, device, request.gpus, budget))
    config = choice.config
    planner, workload = choice.planning.planner(config), choice.planning.workload(config.train)
    own, remedy = planner.own_way, choice.remedy
    advised = changed(asked, remedy.changes) if remedy else config
    origins = settings.origins.items()
    return RunPlan(
        method=recipe.name,
        policy=rows.policy.path,
        own_way=own,
        elements=planner.elements(own.learning),
        workload=workload,
        rows=rows,
        reference=_reference(planner, own, workload),
        planner=planner,
        own=choice.found.components,
        choice=choice,
        request=request,
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


def _facts(
    rows: PlannedRows, recipe: Recipe, config: Config, device: str, ranks: int, budget: Budget
) -> PlanFacts:
    return PlanFacts(
        rows.policy,
        known_dtype(rows.policy.path, config.train.dtype),
        recipe,
        rows.table,
        rows=rows.count,
        held_out=rows.held_out,
        device=device,
        ranks=ranks,
        budget=budget,
    )


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
