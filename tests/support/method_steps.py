"""Optimizer steps for losses: branches made by hand or by chance, run as a trainer would."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from align.schemas.methods import Branches, Masked, Step, Tokens
from align.schemas.rows import Role
from align.stages.methods.modifiers import Modifiers, sums_of
from align.stages.methods.recipe import Part, Recipe, is_good

ROLES = {
    "paired": (Role.CHOSEN, Role.REJECTED),
    "labelled": (Role.DESIRABLE, Role.UNDESIRABLE),
    "grouped": (Role.CANDIDATE, Role.CANDIDATE, Role.CANDIDATE),
    "imitated": (Role.CHOSEN,),
}
MISMATCHED = (0.7, -0.2, 1.1)
# One way to use each modifier; the columns are those of `random_branches`.
IN_USE = {
    "f_divergence": Modifiers(f_divergence="js"),
    "ld_alpha": Modifiers(ld_alpha=0.4),
    "wpo": Modifiers(wpo=True),
    "margin": Modifiers(margin="wanted"),
    "row_weight": Modifiers(row_weight="weight"),
    "humanline": Modifiers(humanline=True, log_eps_p=-0.1, log_eps_r=0.1),
}


def branches(
    logps, reference=None, *, num_tokens=None, roles, scores=None, per_row=2, columns=None
):
    """Branches of plain numbers, each spread evenly over its tokens.

    The log-probs, of branches and of tokens, and the values of tokens are leaves that collect a
    gradient.
    """
    sums = _tensor(logps)
    counts = torch.tensor(num_tokens or [1] * len(sums), dtype=torch.int64)
    wanted = _tensor(reference or [0.0] * len(sums))
    tokens = Tokens(
        counts=counts,
        logps=(sums / counts).repeat_interleave(counts).requires_grad_(),
        reference=(wanted / counts).repeat_interleave(counts),
        values=torch.zeros(int(counts.sum()), dtype=torch.float64, requires_grad=True),
        purity=torch.full((int(counts.sum()),), -0.5, dtype=torch.float64),
    )
    return Branches(
        logps=sums.clone().requires_grad_(),
        reference=wanted,
        num_tokens=counts.double(),
        roles=torch.tensor(roles, dtype=torch.int8),
        scores=_tensor([torch.nan] * len(sums) if scores is None else scores),
        rows=torch.arange(len(sums)) // per_row,
        places=torch.arange(len(sums)),
        tokens=tokens,
        columns={name: _tensor(values) for name, values in (columns or {}).items()},
    )


def pair(chosen, rejected, reference=(0.0, 0.0), num_tokens=(1, 1), scores=None):
    """One row: log-probs of its chosen and its rejected branch."""
    return branches(
        [chosen, rejected],
        list(reference),
        num_tokens=list(num_tokens),
        roles=ROLES["paired"],
        scores=scores,
    )


def random_branches(kind, rows, seed=0, *, roles=None, per_row=None):
    """Branches with log-ratios of a few nats around zero; chosen ones have the higher scores.

    `roles` are those of a row, as its kind has them, and repeated `rows` times. `per_row` cuts
    them into other rows than these.
    """
    made = torch.Generator().manual_seed(seed)
    of_row = roles or ROLES[kind]
    size, count = per_row or len(of_row), len(of_row) * rows
    counts = torch.randint(3, 40, (count,), generator=made)

    def uniform(number):
        return torch.rand(number, generator=made, dtype=torch.float64)

    def normal(number):
        return torch.randn(number, generator=made, dtype=torch.float64)

    total = int(counts.sum())
    logps = -(0.2 + uniform(count).repeat_interleave(counts) + 2 * uniform(total))
    ratios = 4 * normal(count) / counts
    tokens = Tokens(
        counts=counts,
        logps=logps.clone().requires_grad_(),
        reference=logps - ratios.repeat_interleave(counts) - 0.1 * normal(total),
        values=normal(total).requires_grad_(),
        purity=-2 * uniform(total),
    )
    scores = normal(count)
    if kind == "paired":
        scores = scores.view(-1, 2).sort(descending=True).values.view(-1)
    made_rows = -(-count // size)
    whole = branches(
        sums_of(logps, counts).tolist(),
        sums_of(tokens.reference, counts).tolist(),
        num_tokens=counts.tolist(),
        roles=of_row * rows,
        scores=scores.tolist(),
        per_row=size,
        columns={
            "wanted": normal(made_rows).tolist(),
            "weight": (0.2 + uniform(made_rows)).tolist(),
        },
    )
    return replace(whole, tokens=tokens)


def moved(whole, *, logps=None, reference=None):
    """The same branches with other sums, what changed spread evenly over their tokens."""
    tokens = whole.tokens
    new = whole.logps.detach() if logps is None else logps.detach()
    wanted = whole.reference if reference is None else reference.detach()
    shifts = (
        ((after - before.detach()) / whole.num_tokens).repeat_interleave(tokens.counts)
        for after, before in ((new, whole.logps), (wanted, whole.reference))
    )
    both = (tokens.logps.detach(), tokens.reference)
    token_logps, token_reference = (old + by for old, by in zip(both, shifts, strict=True))
    return replace(
        whole,
        logps=new.clone().requires_grad_(),
        reference=wanted.clone(),
        tokens=replace(tokens, logps=token_logps.requires_grad_(), reference=token_reference),
    )


def unmoved(whole):
    """The same branches before the first step: each token as likely as under the reference."""
    still = replace(whole, reference=whole.logps.detach().clone())
    tokens = replace(whole.tokens, reference=whole.tokens.logps.detach().clone())
    return replace(still, tokens=tokens)


def part(whole, rows):
    """The rows of these numbers, in this order, as a micro-batch of their own."""
    owned = [(whole.rows == row).nonzero()[:, 0] for row in rows]
    own = torch.cat([*owned, whole.rows[:0]])
    counts = whole.tokens.counts
    spans = torch.arange(int(counts.sum())).split(counts.tolist())
    here = torch.cat([*(spans[branch] for branch in own.tolist()), counts[:0]])
    of_branches = ("logps", "reference", "num_tokens", "roles", "scores", "places")
    of_tokens = ("logps", "reference", "values", "purity")
    return Branches(
        **{name: getattr(whole, name)[own] for name in of_branches},
        rows=torch.arange(len(owned)).repeat_interleave(torch.tensor([*map(len, owned)]).long()),
        tokens=Tokens(
            counts=counts[own], **{name: getattr(whole.tokens, name)[here] for name in of_tokens}
        ),
        columns={name: values[list(rows)] for name, values in whole.columns.items()},
    )


def reordered(whole, rows):
    """The same rows in another order, as a step of their own."""
    turned = part(whole, rows)
    tokens = replace(
        turned.tokens,
        logps=turned.tokens.logps.detach().requires_grad_(),
        values=turned.tokens.values.detach().requires_grad_(),
    )
    return replace(
        turned,
        logps=turned.logps.detach().requires_grad_(),
        places=torch.arange(len(turned.roles)),
        tokens=tokens,
    )


def num_rows(whole):
    """How many rows these branches belong to."""
    return len(whole.rows.unique())


def step_of(whole, mismatched=(), surveyed=None):
    """The facts of a step that consists of these branches."""
    return Step(
        rows=num_rows(whole),
        branches=len(whole.roles),
        tokens=int(whole.num_tokens.sum()),
        chosen_tokens=int(whole.num_tokens[is_good(whole)].sum()),
        mismatched=_tensor(mismatched),
        surveyed=surveyed or {},
    )


@dataclass(frozen=True)
class Taken:
    """What came out of a step."""

    losses: torch.Tensor  # (items,) in step order
    loss: float  # their global mean
    gradient: torch.Tensor  # (branches,) of the mean, by the sums that the policy gives
    token_gradient: torch.Tensor  # (tokens,) of the mean, by each token's log-prob, any way
    value_gradient: torch.Tensor  # (tokens,) of the mean, by each token's value
    metrics: dict  # name -> every value of the step
    means: dict  # as a trainer reports them, but for the loss
    reported: float | None  # the loss as a trainer reports it
    state: dict  # of the methods from here on


def take(method, whole, *, options=None, modifiers=None, **how):
    """Runs a step by one method; `how` is that of `take_recipe`."""
    given = method.options() if options is None else options
    recipe = Recipe((Part(method, given),), modifiers or Modifiers())
    return take_recipe(recipe, whole, **how)


def take_recipe(recipe, whole, *, cuts=(), assignment=None, mismatched=(), state=None):
    """Runs a step as the trainer does: survey, state, losses; sums first, and divides once.

    Its micro-batches end at the rows `cuts`, or hold the rows that `assignment` lists for each.
    """
    edges = [0, *cuts, num_rows(whole)]
    assignment = assignment or [list(range(*edge)) for edge in pairwise(edges)]
    micros = [_as_shown(part(whole, rows), recipe) for rows in assignment]
    step = step_of(whole, mismatched, surveyed_by(recipe, micros))
    now = recipe.next_state(state or {}, step.surveyed)
    for leaf in _leaves(whole):
        leaf.grad = None
    outcomes = []
    for micro in micros:
        outcome = recipe.outcome(micro, step, now)
        outcome.share.backward()
        outcomes.append(outcome)
    return _summed(recipe, whole, micros, outcomes, now)


def _as_shown(micro, recipe):
    """Only what the recipe asks for, as the trainer makes only that."""
    if recipe.head == "score":
        return replace(micro, tokens=None)
    needs = {"token_reference": "reference", "values": "values", "purity": "purity"}
    hidden = {name: None for need, name in needs.items() if need not in recipe.needs}
    return replace(micro, tokens=replace(micro.tokens, **hidden))


def surveyed_by(recipe, micros):
    """What the recipe asks of every branch of these micro-batches, in step order."""
    with torch.no_grad():
        found = [recipe.survey(micro) for micro in micros]
    order = torch.cat([micro.places for micro in micros]).argsort()
    return {name: torch.cat([values[name] for values in found])[order] for name in found[0]}


def _summed(recipe, whole, micros, outcomes, state):
    metrics, totals = {}, {}
    for outcome in outcomes:
        for name, metric in outcome.metrics.items():
            values = counted(metric)
            assert not values.requires_grad, name
            metrics[name] = torch.cat([metrics.get(name, values[:0]), values])
        for name, one in outcome.totals.items():
            total, count = totals.get(name, (0.0, 0.0))
            totals[name] = (total + one.total.item(), count + float(one.count))
    told = {name: total / count for name, (total, count) in totals.items() if count}
    by_branch, by_token, by_value = (
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
        for leaf in _leaves(whole)
    )
    return Taken(
        losses=_in_step_order(micros, [outcome.losses for outcome in outcomes]),
        loss=sum(outcome.share.item() for outcome in outcomes),
        gradient=by_branch,
        token_gradient=by_token + by_branch.repeat_interleave(whole.tokens.counts),
        value_gradient=by_value,
        metrics=metrics,
        means={name: values.mean().item() for name, values in metrics.items() if len(values)},
        reported=recipe.with_loss(told).get("loss"),
        state=state,
    )


def counted(metric):
    """The values of a metric that count."""
    return metric.values[metric.is_counted] if isinstance(metric, Masked) else metric


def _in_step_order(micros, losses):
    """Losses of rows or of branches, wherever the rows were dealt to."""
    places = [
        micro.places
        if len(own) == len(micro.places)
        else micro.places[micro.rows.diff(prepend=micro.rows[:1] - 1) != 0]
        for micro, own in zip(micros, losses, strict=True)
    ]
    return torch.cat(losses)[torch.cat(places).argsort()]


def _leaves(whole):
    return (whole.logps, whole.tokens.logps, whole.tokens.values)


def _tensor(values):
    return torch.tensor(values, dtype=torch.float64)
