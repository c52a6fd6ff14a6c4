"""From a micro-batch to what a method reads: per-branch sums of the policy's log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...schemas.methods import Branches, Step

if TYPE_CHECKING:
    from torch import Tensor

    from ...schemas.batches import MicroBatch, StepBatch
    from ...schemas.engine import Engine
    from ...schemas.methods import LossOutput, Method


@dataclass(frozen=True)
class Objective:
    """A method with its options settled."""

    method: Method
    options: Any

    def loss(self, branches: Branches, step: Step) -> LossOutput:
        """The loss of each item of a micro-batch."""
        return self.method.loss(branches, step, self.options)

    def num_items(self, step: Step) -> int:
        """What the loss of a whole step is divided by."""
        return step.rows if self.method.items == "rows" else step.branches


def branches_of(engine: Engine, batch: MicroBatch) -> Branches:
    """Runs the policy over a micro-batch."""
    logps, lengths = _branch_sums(engine, batch)
    device = logps.device
    sizes = torch.tensor([len(tree.branches) for tree in batch.trees], dtype=torch.int64)
    return Branches(
        logps=logps,
        reference=torch.from_numpy(batch.reference).to(device),
        num_tokens=lengths.to(device, torch.float64),
        roles=torch.from_numpy(batch.roles).to(device),
        scores=torch.from_numpy(batch.scores).to(device, torch.float64),
        rows=torch.arange(len(sizes)).repeat_interleave(sizes).to(device),
    )


def step_of(engine: Engine, objective: Objective, batch: StepBatch) -> Step:
    """What the micro-batches of a step have in common; runs its mismatched branches first."""
    if objective.method.needs_mismatched:
        mismatched = _mismatched_ratios(engine, batch)
    else:
        mismatched = torch.empty(0, dtype=torch.float64)
    return Step(batch.rows, batch.branches, batch.tokens, batch.chosen_tokens, mismatched)


@torch.no_grad()
def _mismatched_ratios(engine: Engine, batch: StepBatch) -> Tensor:
    """Log-ratios of all mismatched branches of the step, in the step's own order.

    So their mean is the same to the last bit however they were spread over ranks.
    """
    engine.learn_mode(dropout_seed=None)
    ratios, places = [], []
    for micro in batch.mismatched:
        branches = branches_of(engine, micro)
        ratios.append(branches.logps - branches.reference)
        places.append(torch.from_numpy(micro.places).to(branches.logps))
    joined = engine.gathered(torch.cat(ratios))
    order = torch.argsort(engine.gathered(torch.cat(places)))
    assert len(order) == batch.mismatched_branches, "every mismatched branch is run once"
    return joined[order]


def _branch_sums(engine: Engine, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Sums over completion tokens in float64, and how many tokens there were."""
    tokens = engine.token_logps(batch.trees).double()
    counts = [len(branch) for tree in batch.trees for branch in tree.branches]
    lengths = torch.tensor(counts, dtype=torch.int64, device=tokens.device)
    if not counts:
        return tokens, lengths
    # Not index_add: on a GPU its order of summation, and so its last bits, vary.
    return torch.segment_reduce(tokens, "sum", lengths=lengths, unsafe=True), lengths
