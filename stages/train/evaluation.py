"""Evaluation: all rows of a held-out set are one step of the loss, without an update.

Before the first training step, the policy's log-probs are compared with the cache's.
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
from ...schemas.methods import Completions, Step
from ...schemas.row_table import Rows
from ...schemas.rows import Rescored, Role
from ..engine.distributed import gathered
from ..methods.objective import MethodState, Objective
from .memory import catching_out_of_memory
from .step import Sums, completions_of, step_of

if TYPE_CHECKING:
    from ..engine.deepspeed_engine import DeepSpeedEngine


def needs_pre_pass(objective: Objective) -> bool:
    """Whether the loss needs a first pass over all held-out rows."""
    return objective.has_pre_pass or "mismatched" in objective.needs


@torch.no_grad()
def whole_step(
    engine: DeepSpeedEngine, objective: Objective, batches: Iterable[StepBatch], size: StepSize
) -> Step:
    """The held-out rows as one step, with the values that the first pass gathers."""
    steps = [step_of(engine, objective, batch) for batch in batches]
    names = steps[0].pre_pass if steps else ()
    return Step(
        rows=size.rows,
        completions=size.completions,
        tokens=size.tokens,
        chosen_tokens=size.chosen_tokens,
        mismatched=_joined([step.mismatched for step in steps]),
        pre_pass={name: _joined([step.pre_pass[name] for step in steps]) for name in names},
    )


@torch.no_grad()
def means_of_held_out(
    engine: DeepSpeedEngine,
    objective: Objective,
    batches: Iterable[StepBatch],
    *,
    step: Step,
    state: MethodState,
    samples: EvalSamples,
) -> dict[str, float]:
    """The means of all metrics over all batches, without an update."""
    sums, rows_before, completions_before = Sums(), 0, 0
    for batch in batches:
        engine.learn_mode(dropout_seed=None)
        for micro in batch.own:
            with catching_out_of_memory(micro):
                completions = completions_of(engine, objective, micro)
                if rows_before < samples.most_rows:
                    samples.add(
                        micro,
                        completions,
                        objective.rewards(completions),
                        before=completions_before,
                    )
                indices = completions.step_indices + completions_before
                here = replace(completions, step_indices=indices)
                outcome = objective.outcome(here, step, state)
            sums.add(outcome.metrics)
        rows_before += batch.rows
        completions_before += batch.completions
    means, _ = sums.read(engine, {})
    return objective.reported(means)


def _joined(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values else torch.empty(0, dtype=torch.float64)


class EvalSamples:
    """The completions of the first rows of an evaluation, the same on any number of ranks."""

    def __init__(self, name: str = "", *, most_rows: int, keeps_ids: bool) -> None:
        self._set = name
        self.most_rows = most_rows
        self._keeps_ids = keeps_ids
        # Each with its own index in the evaluation, and its row's first completion's index.
        self._seen: list[tuple[int, int, EvalSample]] = []

    def add(
        self, micro: MicroBatch, completions: Completions, rewards: Tensor | None, *, before: int
    ) -> None:
        """Adds the completions of a micro-batch; earlier batches have `before` of them."""
        logps = iter(completions.logps.detach().cpu().tolist())
        found = repeat(None) if rewards is None else iter(rewards.cpu().tolist())
        counts = iter(completions.num_tokens.long().cpu().tolist())
        indices = (micro.step_indices + before).tolist()
        block, at = micro.block, 0
        # From the cache: ids do not identify a prompt, as they may differ for one key.
        keys = block.of_rows.column("prompt_key").to_pylist()
        for row_id, key, tree in zip(micro.row_ids, keys, micro.trees, strict=True):
            first = indices[at]
            for completion in tree.branches:
                sample = EvalSample(
                    row=-1,  # set once the completions of all ranks are gathered
                    row_id=row_id,
                    prompt_key=key.hex(),
                    role=Role(int(block.roles[at])),
                    num_tokens=next(counts),
                    logp=next(logps),
                    reference_logp=float(block.logps[at]),
                    reward=next(found),
                    prompt=tree.prompt.copy() if self._keeps_ids else None,
                    completion=completion.copy() if self._keeps_ids else None,
                    set=self._set,
                )
                self._seen.append((indices[at], first, sample))
                at += 1

    def gather(self, world: World) -> tuple[EvalSample, ...]:
        """The samples of all ranks in the order of the evaluation; a collective call."""
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
    """The largest difference of the policy's log-probs from the cache's; FingerprintError if large.

    With `may_differ` only values that are not finite are refused. Every rank scores the same rows,
    because a sharded policy needs all ranks for each of them.
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
    row = block.row[block.row_of_completion[at]]
    return FingerprintError(
        f"{name}: the policy is the reference of this cache, but a completion of input row {row} "
        f"has log-prob {again.logps[at]:.6f}, and {block.logps[at]:.6f} in the cache. Run "
        "`align verify` to see whether the cache is damaged. If it is not, this machine computes "
        "other numbers than the one that made it: make the cache again here, or with "
        "--dtype float32."
    )
