"""One optimizer step: mismatched branches, gradients, an update at the scheduled learning rate."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...schemas.batches import Engine, MicroBatch, StepBatch
from ...schemas.config import TrainOptions
from ...schemas.methods import ROUTING, Branches, Step, Tokens
from ..methods.modifiers import sums_of
from ..methods.recipe import LOSS, MethodState, Outcome, Recipe
from ..methods.rewards import with_margin
from ..storage.failpoints import reach
from .router_balance import router_metrics, router_share


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank but for `suspects`."""

    applied: bool
    totals: Totals  # of everything that was measured
    suspects: tuple[str, ...]  # ids of this rank's rows that may be why it was not applied
    state: MethodState  # of the methods from here on


def train_step(
    engine: Engine,
    recipe: Recipe,
    batch: StepBatch,
    *,
    state: MethodState,
    seed: tuple[int, int],
    router_loss: float = 0.0,
) -> StepResult:
    """Updates the policy by one step; a loss or gradient that is not finite changes nothing.

    `seed` is (seed of the run, global step): with the rank and the micro-batch it draws dropout.
    `router_loss` is the weight of the router loss, which is not part of the loss that is reported.
    """
    step = step_of(engine, recipe, batch, needs_routing=router_loss > 0)
    after = recipe.next_state(state, step.surveyed)
    sums, last, suspects = Sums(), len(batch.own) - 1, _suspects_of_z(batch, step)
    for index, micro in enumerate(batch.own):
        engine.learn_mode(dropout_seed=_draw(*seed, index, engine.world.rank))
        branches = branches_of(engine, recipe, micro)
        outcome = recipe.outcome(branches, step, after)
        share = _with_router_loss(outcome.share, branches, step, router_loss)
        engine.backward(share, is_last=index == last)
        sums.add_outcome(outcome)
        sums.add_routing(branches.routing)
        # What is not finite in all of the step says nothing against the rows themselves.
        if _is_finite(step):
            suspects += _not_finite(micro, outcome.losses)
    totals = sums.totals(engine)
    if not math.isfinite(reported(recipe, totals)[LOSS]):
        engine.skip()
        return StepResult(applied=False, totals=totals, suspects=suspects, state=state)
    reach("step.before_update")
    update = engine.step()
    totals["grad_norm"] = (update.grad_norm, 1.0)
    if not update.applied:
        suspects = tuple(row for micro in batch.own for row in micro.row_ids)
        return StepResult(applied=False, totals=totals, suspects=suspects, state=state)
    return StepResult(applied=True, totals=totals, suspects=suspects, state=after)


def _with_router_loss(share: Tensor, branches: Branches, step: Step, weight: float) -> Tensor:
    if branches.routing is None or step.routing is None:
        return share
    return share + weight * router_share(branches.routing, step.routing)


def reported(recipe: Recipe, totals: Totals) -> dict[str, float]:
    """The means, and the metrics computed from means: the loss of several parts, label margins."""
    return with_margin(recipe.with_loss(means_of(totals)))


def _is_finite(step: Step) -> bool:
    """Whether the values that all rows share are finite."""
    shared = (step.mismatched, *step.surveyed.values())
    return all(bool(values.isfinite().all()) for values in shared)


def _suspects_of_z(batch: StepBatch, step: Step) -> tuple[str, ...]:
    ratios = step.mismatched
    found = [_not_finite(micro, ratios[micro.places]) for micro in batch.mismatched]
    return tuple(row for rows in found for row in rows)


def _not_finite(micro: MicroBatch, values: Tensor) -> tuple[str, ...]:
    """The rows with a value, per row or per branch, that is not finite."""
    sizes = [len(tree.branches) if len(values) > len(micro.trees) else 1 for tree in micro.trees]
    owners = np.repeat(np.array(micro.row_ids, dtype=np.str_), sizes)
    wrong = owners[~values.isfinite().cpu().numpy()]
    return tuple(dict.fromkeys(wrong.tolist()))


def _draw(*parts: int) -> int:
    """A seed that depends on all parts and nothing else."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def branches_of(engine: Engine, recipe: Recipe, batch: MicroBatch) -> Branches:
    """Runs the policy over a micro-batch."""
    outputs = {name: value.double() for name, value in engine.forward(batch.trees).items()}
    counts = [len(branch) for tree in batch.trees for branch in tree.branches]
    lengths = torch.tensor(counts, dtype=torch.int64, device=outputs["logps"].device)
    per_branch = recipe.head == "score"
    logps = outputs["logps"] if per_branch else sums_of(outputs["logps"], lengths)
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
        tokens=None if per_branch else _tokens(recipe, batch, lengths, outputs),
        columns={
            name: torch.from_numpy(values).to(device) for name, values in batch.carried.items()
        },
        routing=outputs.get(ROUTING),
    )


def step_of(
    engine: Engine, recipe: Recipe, batch: StepBatch, *, needs_routing: bool = False
) -> Step:
    """The values that all micro-batches of a step share, computed without gradients."""
    mismatched = _mismatched_ratios(engine, recipe, batch)
    surveys = recipe.surveys or needs_routing
    own = _without_gradients(engine, recipe, batch.own) if surveys else []
    return Step(
        rows=batch.rows,
        branches=batch.branches,
        tokens=batch.tokens,
        chosen_tokens=batch.chosen_tokens,
        mismatched=mismatched,
        surveyed=_surveyed(engine, recipe, own) if recipe.surveys else {},
        routing=_routing(engine, own) if needs_routing else None,
    )


@torch.no_grad()
def _without_gradients(
    engine: Engine, recipe: Recipe, batches: Sequence[MicroBatch]
) -> list[Branches]:
    engine.learn_mode(dropout_seed=None)
    return [branches_of(engine, recipe, micro) for micro in batches]


@torch.no_grad()
def _mismatched_ratios(engine: Engine, recipe: Recipe, batch: StepBatch) -> Tensor:
    """Log-ratios of all mismatched branches of the step."""
    if "mismatched" not in recipe.needs:
        return torch.empty(0, dtype=torch.float64)
    found = _without_gradients(engine, recipe, batch.mismatched)
    ratios = [recipe.ratios(branches) for branches in found]
    joined = _in_step_order(engine, ratios, _places_of(found))
    assert len(joined) == batch.mismatched_branches, "every mismatched branch is run once"
    return joined


@torch.no_grad()
def _surveyed(engine: Engine, recipe: Recipe, found: list[Branches]) -> dict[str, Tensor]:
    """The values of every own branch of the step that the recipe needs before any loss."""
    values = [recipe.survey(branches) for branches in found]
    places = _places_of(found)
    return {
        name: _in_step_order(engine, [value[name] for value in values], places)
        for name in values[0]
    }


def _routing(engine: Engine, found: list[Branches]) -> Tensor:
    """The sums of the routers over all tokens of the step."""
    sums = [branches.routing for branches in found if branches.routing is not None]
    assert len(sums) == len(found), "the router loss is refused without routers"
    return engine.total(torch.stack(sums).sum(dim=0))


def _in_step_order(engine: Engine, values: list[Tensor], places: list[Tensor]) -> Tensor:
    """Joins values of all micro-batches and ranks in step order.

    So what is computed of them is the same to the last bit however the step was dealt.
    """
    joined = engine.gathered(torch.cat(values))
    return joined[torch.argsort(engine.gathered(torch.cat(places)))]


def _places_of(found: list[Branches]) -> list[Tensor]:
    places = [branches.places for branches in found]
    return [place.double() for place in places if place is not None]


def _tokens(
    recipe: Recipe, batch: MicroBatch, lengths: Tensor, outputs: dict[str, Tensor]
) -> Tokens:
    reference = None
    if "token_reference" in recipe.needs:
        assert batch.reference_tokens is not None, "train_checks asks for a cache that keeps them"
        reference = torch.from_numpy(batch.reference_tokens.values).to(outputs["logps"])
    return Tokens(
        counts=lengths,
        logps=outputs["logps"],
        reference=reference,
        values=outputs.get("values"),
        purity=outputs.get("purity"),
    )


Totals = dict[str, tuple[float, ...]]  # by name: the sum of all values, how many there were


class Sums:
    """Per name, the total of all values and how many there were."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}  # each (2,) float64: total, count
        self._routing: Tensor | None = None  # of a mixture of experts

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Adds every value of each name; a name without values is kept."""
        for name, given in values.items():
            exact = given.detach().double()
            self._add(name, exact.sum(), exact.numel())

    def add_outcome(self, outcome: Outcome) -> None:
        """Adds the outcome of one micro-batch."""
        for name, part in outcome.totals.items():
            self._add(name, part.total.double(), part.count)
        self.add(outcome.metrics)

    def add_routing(self, routing: Tensor | None) -> None:
        """Adds the sums of a mixture's routers."""
        if routing is not None:
            exact = routing.detach().double()
            self._routing = exact if self._routing is None else self._routing + exact

    def _add(self, name: str, total: Tensor, count: float) -> None:
        added = torch.stack([total, total.new_tensor(count)])
        self._totals[name] = self._totals.get(name, torch.zeros_like(added)) + added

    def totals(self, engine: Engine) -> Totals:
        """Over all ranks; names without a value are left out.

        Every rank has the same names: a method reports the same names for any rows.
        """
        names = sorted(self._totals)
        if not names:
            return {}
        own = torch.stack([self._totals[name] for name in names])
        routing = own.new_empty(0, 0) if self._routing is None else self._routing
        reduced = engine.total(torch.cat([own.flatten(), routing.flatten()])).cpu()
        pairs = zip(names, reduced[: own.numel()].view_as(own).tolist(), strict=True)
        routed = router_metrics(reduced[own.numel() :].view_as(routing)) if len(routing) else {}
        return {
            **{name: (total, count) for name, (total, count) in pairs if count},
            # Of one step these are no sums: a line has their mean over its steps.
            **{name: (value, 1.0) for name, value in routed.items()},
        }


def means_of(totals: Totals) -> dict[str, float]:
    """Each total divided by its count."""
    return {name: total / count for name, (total, count) in totals.items()}


def added(some: Totals, others: Totals) -> Totals:
    """The sum of both, name by name."""
    none = (0.0, 0.0)
    sums: Totals = {}
    for name in {**some, **others}:
        (total, count), (more, again) = some.get(name, none), others.get(name, none)
        sums[name] = (total + more, count + again)
    return sums


def finite(totals: Totals) -> Totals:
    """The totals that are finite."""
    return {name: one for name, one in totals.items() if math.isfinite(one[0])}


def learning_rate(step: int, total_steps: int, options: TrainOptions) -> float:
    """The learning rate of the `step`-th update (from 0): linear warmup, then the schedule."""
    rise = warmup_steps(total_steps, options)
    if step < rise:
        return options.lr * (step + 1) / rise
    done = (step - rise) / max(1, total_steps - rise)
    floor = options.min_lr
    if options.schedule == "constant":
        return options.lr
    if options.schedule == "linear":
        return options.lr * max(floor, 1 - (1 - floor) * done)
    return options.lr * (floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


def warmup_steps(total_steps: int, options: TrainOptions) -> int:
    """Below 1 `warmup` is a share of all steps, from 1 on a number of them."""
    if options.warmup < 1:
        # Rounded first: 0.07 * 100 is a little above 7 in floating point.
        return math.ceil(round(options.warmup * total_steps, 6))
    return round(options.warmup)
