"""Decides every `auto` of a run's settings by a memory plan, before weights are loaded."""

from __future__ import annotations

import logging
import platform
from typing import TYPE_CHECKING

from ...schemas.batches import World
from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...stages.engine.distributed import gathered, run_on_rank_zero
from ...stages.model.micro_batch import UntracedError
from ...stages.tracking.progress import Progress
from ..options.settings import changed
from ..plan.memory import Budget, Changes, PlanFacts, chosen, decided, host_bytes
from ..plan.workload import known_dtype

if TYPE_CHECKING:
    from .setup import Run

logger = logging.getLogger("align")


def facts_of_run(run: Run, device: str, device_bytes: int, resumed: str = "") -> PlanFacts:
    """The inputs of a plan from the run, its cache and this machine."""
    train, policy, world = run.config.train, run.begins_as, run.world
    machine = platform.node()
    ranks_here = gathered(world, machine).count(machine)
    host = min(gathered(world, host_bytes() // ranks_here))
    return PlanFacts(
        policy,
        known_dtype(policy.path, train.dtype),
        run.objective,
        run.source.train,
        rows=run.source.train.rows_per_epoch,
        held_out=run.source.eval_rows,
        device=device,
        ranks=world.size,
        budget=Budget.of(train, device_bytes),
        host=host,
        resumed=resumed,
    )


def chosen_to_fit(config: Config, facts: PlanFacts, world: World, progress: Progress) -> Config:
    """The settings with every `auto` decided, the same on every rank."""
    if world.rank == 0:  # a large model takes some time
        progress.log("memory: planning settings that fit, before weights are loaded")
    changes, notes = run_on_rank_zero(world, lambda: _changes_by_plan(config, facts))
    if world.rank == 0:
        for note in notes:
            progress.log(f"memory: {note}")
    return changed(config, changes)


def _changes_by_plan(config: Config, facts: PlanFacts) -> tuple[Changes, tuple[str, ...]]:
    """The decided settings and notes on them; refuses a training that exceeds train.memory."""
    try:
        choice = chosen(config, facts)
    except UntracedError as error:
        if facts.budget.is_asked:
            raise UsageError(
                f"train.memory: {error} Leave it out, and choose memory settings yourself."
            ) from error
        logger.warning("%s Settings that are auto are decided without a plan.", error)
        return decided(config.train), ()
    choice.require_fitting()
    return choice.changes, tuple(choice.lines())
