"""One optimizer step: mismatched pairs, then gradients, then one update on every rank."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..methods.recipe import LOSS
from ..methods.rewards import with_margin
from ..storage.failpoints import reach
from .forward import branches_of, step_of
from .sums import Sums, means_of

if TYPE_CHECKING:
    from torch import Tensor

    from ...schemas.batches import Engine, MicroBatch, StepBatch
    from ...schemas.methods import Step
    from ..methods.recipe import Memory, Recipe
    from .sums import Totals


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every rank but for `suspects`."""

    applied: bool
    totals: Totals  # of everything that was measured
    suspects: tuple[str, ...]  # ids of this rank's rows that may be why it was not applied
    memory: Memory  # what the methods remember from here on


def train_step(
    engine: Engine, recipe: Recipe, batch: StepBatch, *, memory: Memory, seed: tuple[int, int]
) -> StepResult:
    """Updates the policy by one step; a loss or gradient that is not finite changes nothing.

    `seed` is (seed of the run, global step): with the rank and the micro-batch it draws dropout.
    """
    step = step_of(engine, recipe, batch)
    now = recipe.remembered(memory, step.surveyed)
    sums, last, suspects = Sums(), len(batch.own) - 1, _suspects_of_z(batch, step)
    for index, micro in enumerate(batch.own):
        engine.learn_mode(dropout_seed=_draw(*seed, index, engine.world.rank))
        outcome = recipe.outcome(branches_of(engine, recipe, micro), step, now)
        engine.backward(outcome.share, is_last=index == last)
        sums.add_outcome(outcome)
        # What is not finite in all of the step tells nothing against the rows themselves.
        if _is_finite(step):
            suspects += _not_finite(micro, outcome.losses)
    totals = sums.totals(engine)
    if not math.isfinite(reported(recipe, totals)[LOSS]):
        engine.skip()
        return StepResult(applied=False, totals=totals, suspects=suspects, memory=memory)
    reach("step.before_update")
    update = engine.step()
    totals["grad_norm"] = (update.grad_norm, 1.0)
    if not update.applied:
        suspects = tuple(row for micro in batch.own for row in micro.row_ids)
        return StepResult(applied=False, totals=totals, suspects=suspects, memory=memory)
    return StepResult(applied=True, totals=totals, suspects=suspects, memory=now)


def reported(recipe: Recipe, totals: Totals) -> dict[str, float]:
    """Means, and what is made of means only: the loss of several parts, the margin of labels."""
    return with_margin(recipe.with_loss(means_of(totals)))


def _is_finite(step: Step) -> bool:
    """Whether nothing that all rows have in common spoils every loss."""
    shared = (step.mismatched, *step.surveyed.values())
    return all(bool(values.isfinite().all()) for values in shared)


def _suspects_of_z(batch: StepBatch, step: Step) -> tuple[str, ...]:
    ratios = step.mismatched
    found = [_not_finite(micro, ratios[micro.places]) for micro in batch.mismatched]
    return tuple(row for rows in found for row in rows)


def _not_finite(micro: MicroBatch, values: Tensor) -> tuple[str, ...]:
    """Rows for which one of these values, one for each row or one for each branch, is not."""
    sizes = [len(tree.branches) if len(values) > len(micro.trees) else 1 for tree in micro.trees]
    owners = np.repeat(np.array(micro.row_ids, dtype=np.str_), sizes)
    wrong = owners[~values.isfinite().cpu().numpy()]
    return tuple(dict.fromkeys(wrong.tolist()))


def _draw(*parts: int) -> int:
    """A seed that depends on all parts and on nothing else."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
