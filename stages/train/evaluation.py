"""An evaluation is one step: what a loss asks of a whole step it asks of all held-out rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...schemas.methods import Step
from ..storage.failpoints import reach
from .forward import branches_of, step_of
from .step import reported
from .sums import Sums

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from ...schemas.batches import Engine, StepBatch, StepSize
    from ..methods.recipe import Memory, Recipe
    from .witness import Witness


def asks_first(recipe: Recipe) -> bool:
    """Whether the policy has to see all held-out rows once before any of their losses."""
    return recipe.surveys or "mismatched" in recipe.needs


@torch.no_grad()
def whole_step(
    engine: Engine, recipe: Recipe, batches: Iterable[StepBatch], size: StepSize
) -> Step:
    """What all held-out rows have in common, a float64 or a few for each branch of theirs."""
    steps = []
    for batch in batches:
        reach("evaluation.batch")
        steps.append(step_of(engine, recipe, batch))
    names = steps[0].surveyed if steps else ()
    return Step(
        rows=size.rows,
        branches=size.branches,
        tokens=size.tokens,
        chosen_tokens=size.chosen_tokens,
        mismatched=_joined([step.mismatched for step in steps]),
        surveyed={name: _joined([step.surveyed[name] for step in steps]) for name in names},
    )


@torch.no_grad()
def evaluate(
    engine: Engine,
    recipe: Recipe,
    batches: Iterable[StepBatch],
    *,
    step: Step,
    memory: Memory,
    witness: Witness,
) -> dict[str, float]:
    """Means over all items of all batches, nothing learned."""
    sums, place = Sums(), 0
    for batch in batches:
        reach("evaluation.batch")
        witness.begin(batch)
        engine.learn_mode(dropout_seed=None)
        for micro in batch.own:
            branches = branches_of(engine, recipe, micro)
            witness.see(micro, branches, recipe)
            assert branches.places is not None, "a micro-batch knows where its branches stand"
            here = replace(branches, places=branches.places + place)
            sums.add_outcome(recipe.outcome(here, step, memory))
        place += batch.branches
    return reported(recipe, sums.totals(engine))


def _joined(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values else torch.empty(0, dtype=torch.float64)
