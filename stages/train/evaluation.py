"""Evaluation: all held-out rows are one step of the loss, without an update.

Before the first step the policy's log-probs are compared with those of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...schemas.batches import EvalSample, MicroBatch, StepBatch, StepSize, World
from ...schemas.columns import Ragged
from ...schemas.errors import FingerprintError
from ...schemas.methods import Branches, Step
from ...schemas.row_table import Rows
from ...schemas.rows import Rescored, Role
from ..engine.distributed import gathered
from ..methods.recipe import MethodState, Recipe
from .memory import catching_out_of_memory
from .step import Sums, branches_of, step_of

if TYPE_CHECKING:
    from ..engine.deepspeed_engine import DeepSpeedEngine


def needs_pre_pass(recipe: Recipe) -> bool:
    """Whether the loss needs a pass over all held-out rows before it can be computed."""
    return recipe.has_pre_pass or "mismatched" in recipe.needs


@torch.no_grad()
def whole_step(
    engine: DeepSpeedEngine, recipe: Recipe, batches: Iterable[StepBatch], size: StepSize
) -> Step:
    """The held-out rows as one step, with the values that its loss needs beforehand."""
    steps = [step_of(engine, recipe, batch) for batch in batches]
    names = steps[0].pre_pass if steps else ()
    return Step(
        rows=size.rows,
        branches=size.branches,
        tokens=size.tokens,
        chosen_tokens=size.chosen_tokens,
        mismatched=_joined([step.mismatched for step in steps]),
        pre_pass={name: _joined([step.pre_pass[name] for step in steps]) for name in names},
    )


@torch.no_grad()
def means_of_held_out(
    engine: DeepSpeedEngine,
    recipe: Recipe,
    batches: Iterable[StepBatch],
    *,
    step: Step,
    state: MethodState,
    samples: EvalSamples,
) -> dict[str, float]:
    """Means over all items of all batches, without an update."""
    sums, rows_before, branches_before = Sums(), 0, 0
    for batch in batches:
        engine.learn_mode(dropout_seed=None)
        for micro in batch.own:
            with catching_out_of_memory(micro):
                branches = branches_of(engine, recipe, micro)
                if rows_before < samples.most_rows:
                    samples.add(micro, branches, recipe.rewards(branches), before=branches_before)
                indices = branches.step_indices + branches_before
                here = replace(branches, step_indices=indices)
                outcome = recipe.outcome(here, step, state)
            sums.add(outcome.metrics)
        rows_before += batch.rows
        branches_before += batch.branches
    means, _ = sums.read(engine, {})
    return recipe.reported(means)


def _joined(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values else torch.empty(0, dtype=torch.float64)


class EvalSamples:
    """The completions of the first rows of an evaluation, the same on any number of ranks."""

    def __init__(self, *, most_rows: int, keeps_ids: bool) -> None:
        self.most_rows = most_rows
        self._keeps_ids = keeps_ids
        # Each with its index in the evaluation, and that of its row's first completion.
        self._seen: list[tuple[int, int, EvalSample]] = []

    def add(
        self, micro: MicroBatch, branches: Branches, rewards: Tensor | None, *, before: int
    ) -> None:
        """Adds the completions of a micro-batch; so many are in the batches before its own."""
        logps = iter(branches.logps.detach().cpu().tolist())
        found = repeat(None) if rewards is None else iter(rewards.cpu().tolist())
        counts = iter(branches.num_tokens.long().cpu().tolist())
        indices = (micro.step_indices + before).tolist()
        block, at = micro.block, 0
        # The cache's own: prompts of one key may differ in their last token, or by a role's text.
        keys = block.of_rows.column("prompt_key").to_pylist()
        for row_id, key, tree in zip(micro.row_ids, keys, micro.trees, strict=True):
            first = indices[at]
            for completion in tree.branches:
                sample = EvalSample(
                    row=-1,  # until the completions of all ranks are together
                    row_id=row_id,
                    prompt_key=key.hex(),
                    role=Role(int(block.roles[at])),
                    num_tokens=next(counts),
                    logp=next(logps),
                    reference_logp=float(block.logps[at]),
                    reward=next(found),
                    prompt=tree.prompt.copy() if self._keeps_ids else None,
                    completion=completion.copy() if self._keeps_ids else None,
                )
                self._seen.append((indices[at], first, sample))
                at += 1

    def gather(self, world: World) -> tuple[EvalSample, ...]:
        """The samples of all ranks in the order of the evaluation; a collective."""
        every = [one for part in gathered(world, self._seen) for one in part]
        every.sort(key=lambda one: one[0])
        rows: dict[int, int] = {}
        numbered = [
            replace(sample, row=rows.setdefault(first, len(rows))) for _, first, sample in every
        ]
        return tuple(one for one in numbered if one.row < self.most_rows)


def largest_gap(
    engine: DeepSpeedEngine,
    sample: Iterable[tuple[str, Rows]],
    *dtypes: str,
    may_differ: bool = False,
) -> float:
    """The largest difference of the policy's log-probs from a cache's; too large ones are refused.

    With `may_differ` only values that are not finite are refused. Every rank scores the same rows:
    a policy that is sharded over ranks needs all of them for each.
    """
    engine.learn_mode(dropout_seed=None)
    worst = 0.0
    for name, block in sample:
        again = Rescored.of(block, _scored(engine, block), *dtypes)
        if not (np.isfinite(again.gaps).all() if may_differ else again.is_same):
            raise _refusal(name, block, again)
        worst = max(worst, float(again.gaps.max()))
    return worst


@torch.no_grad()
def _scored(engine: DeepSpeedEngine, block: Rows) -> Ragged:
    logps = [engine.forward((tree,))["logps"].cpu().numpy() for tree in block.trees()]
    return Ragged(np.concatenate(logps), block.completions.offsets)


def _refusal(name: str, block: Rows, again: Rescored) -> FingerprintError:
    at = again.worst
    row = block.row[block.row_of_branch[at]]
    return FingerprintError(
        f"{name}: the policy is the reference of this cache, yet it scores a branch of input row "
        f"{row} as {again.logps[at]:.6f}, and the cache has {block.logps[at]:.6f}. "
        "`align verify` says whether the cache is damaged. If it is not, this machine computes "
        "other numbers than the one it was made on: make the cache again here, or with "
        "--dtype float32."
    )
