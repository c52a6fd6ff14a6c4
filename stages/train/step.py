"""One optimizer step: KL completions, gradients, an update at the scheduled learning rate."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...schemas.batches import MicroBatch, RowMargins, StepBatch
from ...schemas.methods import ROUTING, Completions, Mean, Metric, Step, Tokens
from ...schemas.train_options import TrainOptions
from ..methods.metrics import is_tie
from ..methods.objective import LOSS, MethodState, Objective, StepState, reads
from ..methods.tensors import sums_of
from ..model.copies import on_device
from .memory import catching_out_of_memory

if TYPE_CHECKING:
    from ..engine.deepspeed_engine import DeepSpeedEngine

T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """The result of a step; all but `suspects` and `row_margins` is equal on every rank."""

    applied: bool
    means: Means  # of all metrics
    suspects: tuple[str, ...]  # ids of this rank's rows that may have prevented the update
    row_margins: RowMargins | None  # of this rank's rows, if train.row_margins is set
    state: MethodState  # of the methods after this step


def train_step(
    engine: DeepSpeedEngine,
    objective: Objective,
    batch: StepBatch,
    *,
    state: MethodState,
    seed: tuple[int, int],
    options: TrainOptions | None = None,
) -> StepResult:
    """Updates the policy by one step; a loss or gradient that is not finite changes nothing.

    MicroBatchTooLarge is raised while only gradients have changed; the caller clears them. `seed`
    is (seed of the run, global step): with the rank and the micro-batch it seeds dropout. The
    reported loss does not include the router loss.
    """
    router_loss = options.router_loss if options else 0.0
    keeps_margins = options is not None and options.row_margins
    step = step_of(engine, objective, batch, balances=router_loss > 0)
    state_then = objective.next_state(state, step.pre_pass)
    sums, losses, last = Sums(), list[Tensor](), len(batch.own) - 1
    if step.routing is not None:
        of_step = partial_router_loss(step.routing, step.routing)
        is_first = engine.world.rank == 0  # one rank adds it
        sums.add({"router/loss": Mean(of_step * is_first, float(is_first))})
    margins = list[Tensor]()
    for index, micro in enumerate(batch.own):
        engine.learn_mode(dropout_seed=_draw(*seed, index, engine.world.rank))
        with catching_out_of_memory(micro):
            completions = completions_of(engine, objective, micro)
            outcome = objective.outcome(completions, step, state_then)
            loss = outcome.loss
            if completions.routing is not None and step.routing is not None:
                loss = loss + router_loss * partial_router_loss(completions.routing, step.routing)
            engine.backward(loss, is_last=index == last)
        sums.add(outcome.metrics)
        losses.append(outcome.losses)
        if keeps_margins:
            margins.append(torch.stack(objective.margins(completions))[:, : len(micro.row_ids)])
    # The only host-device sync of a step.
    means, after = sums.read(engine, state_then)
    row_margins = None
    if keeps_margins:
        values = torch.cat(margins, dim=1)  # one copy from the device
        ties = is_tie(*values)
        row_margins = RowMargins(rows_in(batch), tuple(values[0].tolist()), tuple(ties.tolist()))
    if not math.isfinite(objective.reported(means)[LOSS]):
        engine.skip()
        return StepResult(False, means, _suspects(batch, step, losses), row_margins, state)
    update = engine.step()
    means["grad_norm"] = Mean(update.grad_norm, 1.0)
    if not update.applied:
        return StepResult(False, means, rows_in(batch), row_margins, state)
    return StepResult(True, means, (), row_margins, after)


def rows_in(batch: StepBatch) -> tuple[str, ...]:
    """The ids of this rank's rows."""
    return tuple(row for micro in batch.own for row in micro.row_ids)


def _suspects(batch: StepBatch, step: Step, losses: list[Tensor]) -> tuple[str, ...]:
    """This rank's rows whose loss or KL completion is not finite."""
    shared = (step.mismatched, *step.pre_pass.values())
    values = [(micro, step.mismatched[micro.step_indices]) for micro in batch.mismatched]
    # If a value of the whole step is not finite, no single row is to blame.
    if all(bool(value.isfinite().all()) for value in shared):
        values += zip(batch.own, losses, strict=True)
    found: dict[str, None] = {}
    for micro, one in values:
        # There is one value per row, or per completion.
        sizes = [len(tree.branches) if len(one) > len(micro.trees) else 1 for tree in micro.trees]
        owners = np.repeat(np.array(micro.row_ids, dtype=np.str_), sizes)
        found |= dict.fromkeys(owners[~one.isfinite().cpu().numpy()].tolist())
    return tuple(found)


def _draw(*parts: int) -> int:
    """A seed that is a hash of all parts."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def completions_of(engine: DeepSpeedEngine, objective: Objective, batch: MicroBatch) -> Completions:
    """The completions of a micro-batch with the policy's log-probs, by one forward pass."""
    rows = batch.block
    assert reads(objective.rows, rows.roles), f"rows of {objective.name} are {objective.rows}"
    with catching_out_of_memory(batch):
        outputs = {name: value.double() for name, value in engine.forward(batch.trees).items()}
    device, per_completion = outputs["logps"].device, objective.head == "score"
    is_learned = rows.is_learned
    if is_learned is not None and not per_completion:
        # Unlearned tokens are dropped here: sums, means and lengths are over the others.
        kept = on_device(np.flatnonzero(is_learned), device)
        outputs |= {name: value[kept] for name, value in outputs.items() if name != ROUTING}
    lengths = on_device(rows.num_learned, device)
    return Completions(
        logps=outputs["logps"] if per_completion else sums_of(outputs["logps"], lengths),
        reference=on_device(batch.block.logps, device),
        num_tokens=lengths.double(),
        roles=on_device(rows.roles, device),
        scores=on_device(rows.scores, device).double(),
        rows=on_device(rows.row_of_completion, device),
        step_indices=on_device(batch.step_indices, device),
        tokens=None if per_completion else _tokens(objective, batch, lengths, outputs),
        columns={name: on_device(values, device) for name, values in rows.carried.items()},
        routing=outputs.get(ROUTING),
    )


@torch.no_grad()
def step_of(
    engine: DeepSpeedEngine, objective: Objective, batch: StepBatch, *, balances: bool = False
) -> Step:
    """The values that all micro-batches of a step share, computed without gradients."""
    mismatched, routing = torch.empty(0, dtype=torch.float64), None
    pre_pass: dict[str, Tensor] = {}
    if "mismatched" in objective.needs:
        found = _run(engine, objective, batch.mismatched)
        ratios = _of_each(objective.ratios, batch.mismatched, found)
        mismatched = _in_step_order(engine, ratios, found, batch.mismatched_completions)
    if objective.has_pre_pass or balances:
        found = _run(engine, objective, batch.own)
        if objective.has_pre_pass:
            values = _of_each(objective.pre_pass, batch.own, found)
            pre_pass = {
                name: _in_step_order(
                    engine, [one[name] for one in values], found, batch.completions
                )
                for name in values[0]
            }
        if balances:
            sums = [completions.routing for completions in found if completions.routing is not None]
            routing = engine.total(torch.stack(sums).sum(dim=0))
    return Step(
        rows=batch.rows,
        completions=batch.completions,
        tokens=batch.tokens,
        chosen_tokens=batch.chosen_tokens,
        mismatched=mismatched,
        pre_pass=pre_pass,
        routing=routing,
    )


def _run(
    engine: DeepSpeedEngine, objective: Objective, batches: Sequence[MicroBatch]
) -> list[Completions]:
    engine.learn_mode(dropout_seed=None)
    return [completions_of(engine, objective, micro) for micro in batches]


def _of_each(
    compute: Callable[[Completions], T], batches: Sequence[MicroBatch], found: list[Completions]
) -> list[T]:
    values: list[T] = []
    for micro, completions in zip(batches, found, strict=True):
        with catching_out_of_memory(micro):
            values.append(compute(completions))
    return values


def partial_router_loss(own: Tensor, step: Tensor) -> Tensor:
    """A micro-batch's part of the step's router loss, with the gradient: ().

    The loss is the mean over layers of E sum_e f_e P_e. f_e is the fraction of the step's tokens
    that go to expert e and has no gradient, P_e is the mean probability of e over the tokens. Once
    f is known for the whole step, the loss is a sum over tokens. https://arxiv.org/abs/2101.03961
    """
    experts = step.shape[1] // 2  # the columns are those of RouterWatch.sums
    tokens, count = step[:, :experts], step[:, -1].clamp(min=1.0)
    products = (tokens * own[:, experts:-1]).sum(dim=1)
    return (experts * products / count.square()).mean()


def _in_step_order(
    engine: DeepSpeedEngine, values: list[Tensor], found: list[Completions], count: int
) -> Tensor:
    """Joins values of all micro-batches and ranks in step order, (count,).

    The bits do not depend on the split of the step: each rank scatters its values into a vector of
    zeros, and an all-reduce adds the vectors.
    """
    indices = [completions.step_indices for completions in found]
    joined = torch.cat(values).double()
    whole = joined.new_zeros(count).index_copy(0, torch.cat(indices), joined)
    return engine.total(whole)


def _tokens(
    objective: Objective, batch: MicroBatch, lengths: Tensor, outputs: dict[str, Tensor]
) -> Tokens:
    reference = None
    if "token_reference" in objective.needs:
        assert batch.block.token_logps is not None, "a cache without token log-probs is refused"
        device, is_learned = outputs["logps"].device, batch.block.is_learned
        values = batch.block.token_logps.values
        kept = values if is_learned is None else values[is_learned]
        reference = on_device(kept, device).double()
    return Tokens(
        counts=lengths,
        logps=outputs["logps"],
        reference=reference,
        values=outputs.get("values"),
        collision_logps=outputs.get("collision_logps"),
    )


Means = dict[str, Mean[float]]


class Sums:
    """The metrics of a step or of an evaluation, by name, as sums and counts."""

    def __init__(self) -> None:
        self._sums: dict[str, Mean[Tensor]] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Adds the metrics of a micro-batch; a name without values is kept."""
        for name, given in metrics.items():
            one = given if isinstance(given, Mean) else Mean.of(given)
            self._sums[name] = self._sums[name] + one if name in self._sums else one

    def read(self, engine: DeepSpeedEngine, state: StepState) -> tuple[Means, MethodState]:
        """The sums over all ranks and the methods' state, both by one host-device sync.

        Every rank has the same names, because a method reports the same names for any rows. Names
        with a count of 0 are left out.
        """
        if not self._sums:
            return {}, {}
        names = sorted(self._sums)  # in the same order on every rank
        like, found = self._sums[names[0]].total, [self._sums[name] for name in names]
        own = [one.total.double() for one in found]
        own += [_tensor_of(one.count, like) for one in found]
        known = [_tensor_of(value, like)[None] for values in state.values() for value in values]
        left = iter(torch.cat([engine.total(torch.stack(own)), *known]).tolist())
        totals = [next(left) for _ in names]
        counts = [next(left) for _ in names]
        means = {
            name: Mean(total, count)
            for name, total, count in zip(names, totals, counts, strict=True)
        }
        after = {name: tuple(next(left) for _ in values) for name, values in state.items()}
        return {name: mean for name, mean in means.items() if mean.count}, after


def _tensor_of(number: float | Tensor, like: Tensor) -> Tensor:
    """The number as a tensor () on the device of `like`, without a copy from the host."""
    return number.double() if isinstance(number, Tensor) else like.new_full((), number)


def added(some: Means, others: Means) -> Means:
    """The sums of two sets of metrics, by name."""
    both = {name: some[name] + others[name] for name in some if name in others}
    return {**some, **others, **both}


def finite(means: Means) -> Means:
    """The means that are finite."""
    return {name: mean for name, mean in means.items() if math.isfinite(mean.total)}


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
    """The number of warmup steps: `warmup` below 1 is a fraction of all steps."""
    if options.warmup < 1:
        # Rounded first, because 0.07 * 100 is a little above 7 in floating point.
        return math.ceil(round(options.warmup * total_steps, 6))
    return round(options.warmup)
