"""From a micro-batch to what a method reads: the policy's answers, per branch and per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...schemas.methods import Branches, Step, Tokens
from ..methods.modifiers import sums_of

if TYPE_CHECKING:
    from torch import Tensor

    from ...schemas.batches import Engine, MicroBatch, StepBatch
    from ..methods.recipe import Recipe


def branches_of(engine: Engine, recipe: Recipe, batch: MicroBatch) -> Branches:
    """Runs the policy over a micro-batch."""
    answers = {name: value.double() for name, value in engine.answers(batch.trees).items()}
    counts = [len(branch) for tree in batch.trees for branch in tree.branches]
    lengths = torch.tensor(counts, dtype=torch.int64, device=answers["logps"].device)
    per_branch = recipe.head == "score"
    logps = answers["logps"] if per_branch else sums_of(answers["logps"], lengths)
    device = logps.device
    sizes = torch.tensor([len(tree.branches) for tree in batch.trees], dtype=torch.int64)
    return Branches(
        logps=logps,
        reference=torch.from_numpy(batch.reference).to(device),
        num_tokens=lengths.double(),
        roles=torch.from_numpy(batch.roles).to(device),
        scores=torch.from_numpy(batch.scores).to(device, torch.float64),
        rows=torch.arange(len(sizes)).repeat_interleave(sizes).to(device),
        places=torch.from_numpy(batch.places).to(device),
        tokens=None if per_branch else _tokens(recipe, batch, lengths, answers),
        columns={
            name: torch.from_numpy(values).to(device) for name, values in batch.carried.items()
        },
    )


def step_of(engine: Engine, recipe: Recipe, batch: StepBatch) -> Step:
    """What the micro-batches of a step have in common; asks the policy for it without gradients."""
    return Step(
        rows=batch.rows,
        branches=batch.branches,
        tokens=batch.tokens,
        chosen_tokens=batch.chosen_tokens,
        mismatched=_mismatched_ratios(engine, recipe, batch),
        surveyed=_surveyed(engine, recipe, batch),
    )


@torch.no_grad()
def _mismatched_ratios(engine: Engine, recipe: Recipe, batch: StepBatch) -> Tensor:
    """Log-ratios of all mismatched branches of the step."""
    if "mismatched" not in recipe.needs:
        return torch.empty(0, dtype=torch.float64)
    engine.learn_mode(dropout_seed=None)
    found = [branches_of(engine, recipe, micro) for micro in batch.mismatched]
    ratios = [recipe.ratios(branches) for branches in found]
    joined = _in_step_order(engine, ratios, _places_of(found))
    assert len(joined) == batch.mismatched_branches, "every mismatched branch is run once"
    return joined


@torch.no_grad()
def _surveyed(engine: Engine, recipe: Recipe, batch: StepBatch) -> dict[str, Tensor]:
    """What the recipe asks of every own branch of the step before any loss."""
    if not recipe.surveys:
        return {}
    engine.learn_mode(dropout_seed=None)
    found = [branches_of(engine, recipe, micro) for micro in batch.own]
    values = [recipe.survey(branches) for branches in found]
    places = _places_of(found)
    return {
        name: _in_step_order(engine, [value[name] for value in values], places)
        for name in values[0]
    }


def _in_step_order(engine: Engine, values: list[Tensor], places: list[Tensor]) -> Tensor:
    """Joins values of all micro-batches and ranks in the step's own order.

    So what is computed of them is the same to the last bit however the step was dealt.
    """
    joined = engine.gathered(torch.cat(values))
    return joined[torch.argsort(engine.gathered(torch.cat(places)))]


def _places_of(found: list[Branches]) -> list[Tensor]:
    places = [branches.places for branches in found]
    return [place.double() for place in places if place is not None]


def _tokens(
    recipe: Recipe, batch: MicroBatch, lengths: Tensor, answers: dict[str, Tensor]
) -> Tokens:
    reference = None
    if "token_reference" in recipe.needs:
        assert batch.reference_tokens is not None, "the gate asks for a cache that keeps them"
        reference = torch.from_numpy(batch.reference_tokens.values).to(answers["logps"])
    return Tokens(
        counts=lengths,
        logps=answers["logps"],
        reference=reference,
        values=answers.get("values"),
        purity=answers.get("purity"),
    )
