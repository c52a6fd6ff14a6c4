"""Optimizer steps for losses: completions made by hand or by chance, run as a trainer would."""

import inspect
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from align.schemas.methods import Completions, Mean, Step, Tokens
from align.schemas.rows import Role
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.objective import Objective, Term, is_good
from align.stages.methods.table import METHODS, objective_of

ROLES = {
    "paired": (Role.CHOSEN, Role.REJECTED),
    "labelled": (Role.DESIRABLE, Role.UNDESIRABLE),
    "grouped": (Role.CANDIDATE, Role.CANDIDATE, Role.CANDIDATE),
    "imitated": (Role.CHOSEN,),
}
PAIR, LABELS = ROLES["paired"], ROLES["labelled"]
MISMATCHED = (0.7, -0.2, 1.1)
# One way to use each modifier; the columns are those of `random_completions`.
IN_USE = {
    "f_divergence": Modifiers(f_divergence="js"),
    "ld_alpha": Modifiers(ld_alpha=0.4),
    "mean_ratios": Modifiers(mean_ratios=True),
    "wpo": Modifiers(wpo=True),
    "margin": Modifiers(margin="wanted"),
    "row_weight": Modifiers(row_weight="weight"),
    "humanline": Modifiers(humanline=True, log_eps_p=-0.1, log_eps_r=0.1),
}
# Words among the options that change what a loss is divided by, or a reward.
WORDS = {
    "ipo": {"normalize": "sum"},
    "slic": {"normalize": "mean"},
    "orpo": {"nll_scope": "global_tokens"},
    "cpo": {"nll_scope": "global_tokens"},
    "grpo": {"normalize": "sequence"},
}
MPO = "dpo:0.8+bco_pair:0.2+sft:1"
BY_NAME = {name: (method,) for name, method in METHODS.items()}
MODIFIED = {
    f"{name} {modifier}": (objective_of(name, IN_USE[modifier].active),)
    for name, method in METHODS.items()
    for modifier in sorted(method.modifiers)
}
# Every method as it is, with each word and each modifier that it takes, and some mixtures.
OBJECTIVES = {
    **{
        name: (objective_of(name, {}),) for name in (*METHODS, MPO, "bco:2+aot:0.25", "dpo+kto:0.5")
    },
    **{f"{name} {words}": (objective_of(name, words),) for name, words in WORDS.items()},
    **MODIFIED,
}


def each(cases):
    """Makes a test of each of `cases`: its name, and the arguments that it gives."""

    def named(test):
        names = [*inspect.signature(test).parameters]
        return pytest.mark.parametrize(names, [*cases.values()], ids=[*cases])(test)

    return named


def completions(
    logps, reference=None, *, num_tokens=None, roles, scores=None, per_row=2, columns=None
):
    """Completions of plain numbers, each spread evenly over its tokens."""
    sums, wanted = _tensor(logps), _tensor(reference or [0.0] * len(logps))
    counts = torch.tensor(num_tokens or [1] * len(sums), dtype=torch.int64)
    total = int(counts.sum())
    tokens = Tokens(
        counts=counts,
        logps=(sums / counts).repeat_interleave(counts),
        reference=(wanted / counts).repeat_interleave(counts),
        values=torch.zeros(total, dtype=torch.float64),
        collision_logps=torch.full((total,), -0.5, dtype=torch.float64),
    )
    rows = torch.arange(len(sums)) // per_row
    return _made(tokens, roles, scores, rows, columns, sums=(sums, wanted))


def _made(tokens, roles, scores, rows, columns, *, sums=None):
    """Completions of these tokens.

    The log-probs, of completions and of tokens, and the values of tokens are leaves that collect a
    gradient.
    """
    if not sums:
        both = (tokens.logps, tokens.reference)
        parts = [values.split(tokens.counts.tolist()) for values in both]
        sums = [_tensor([one.sum().item() for one in some]) for some in parts]
    whole = Completions(
        logps=sums[0],
        reference=sums[1],
        num_tokens=tokens.counts.double(),
        roles=torch.tensor(roles, dtype=torch.int8),
        scores=_tensor([torch.nan] * len(roles) if scores is None else scores),
        rows=rows,
        step_indices=torch.arange(len(roles)),
        tokens=tokens,
        columns={name: _tensor(values) for name, values in (columns or {}).items()},
    )
    return _as_leaves(whole)


def pair(chosen, rejected, reference=(0.0, 0.0), num_tokens=(1, 1), scores=None):
    """One row: log-probs of its chosen and its rejected completion."""
    how = {"num_tokens": list(num_tokens), "roles": PAIR, "scores": scores}
    return completions([chosen, rejected], list(reference), **how)


@dataclass(frozen=True)
class Said:
    """A completion: what its tokens are to the policy and the reference, and its score."""

    ratios: tuple  # log(policy / reference) of each token
    score: float = 0.0
    values: tuple = ()  # of each token; all 0 if left out
    logps: tuple = ()  # the policy's; all -2 if left out
    collision_logps: tuple = ()  # log sum of p^2; all -1 if left out


def rows_of(*rows, roles=(Role.CANDIDATE,) * 99, columns=None):
    """Completions of rows, each a list of `Said`."""
    said = [one for row in rows for one in row]

    def of_tokens(name, otherwise):
        values = [getattr(one, name) or (otherwise,) * len(one.ratios) for one in said]
        return _tensor([value for of_one in values for value in of_one])

    logps = of_tokens("logps", -2.0)
    tokens = Tokens(
        counts=torch.tensor([len(one.ratios) for one in said], dtype=torch.int64),
        logps=logps,
        reference=logps - of_tokens("ratios", 0.0),
        values=of_tokens("values", 0.0),
        collision_logps=of_tokens("collision_logps", -1.0),
    )
    of_row = [role for row in rows for role in roles[: len(row)]]
    numbers = torch.tensor([n for n, row in enumerate(rows) for _ in row], dtype=torch.int64)
    return _made(tokens, of_row, [one.score for one in said], numbers, columns)


def random_rows(sizes, seed=0):
    """Rows with these numbers of completions, each of a few tokens."""
    made = torch.Generator().manual_seed(seed)

    def normal(count, scale=1.0):
        drawn = scale * torch.randn(count, generator=made, dtype=torch.float64)
        return tuple(drawn.tolist())

    def said():
        count = int(torch.randint(1, 9, (), generator=made))
        return Said(
            ratios=normal(count, 0.8),
            score=normal(1, 3.0)[0],
            values=normal(count),
            logps=tuple(-0.1 - abs(x) for x in normal(count)),
            collision_logps=tuple(-0.1 - abs(x) for x in normal(count)),
        )

    return [[said() for _ in range(size)] for size in sizes]


def random_completions(kind, rows, seed=0, *, roles=None, per_row=None):
    """Completions with log-ratios of a few nats around zero; chosen ones have the higher scores.

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
        logps=logps,
        reference=logps - ratios.repeat_interleave(counts) - 0.1 * normal(total),
        values=normal(total),
        collision_logps=-2 * uniform(total),
    )
    scores = normal(count)
    if kind == "paired":
        scores = scores.view(-1, 2).sort(descending=True).values.view(-1)
    made_rows = -(-count // size)
    columns = {"wanted": normal(made_rows).tolist(), "weight": (0.2 + uniform(made_rows)).tolist()}
    return _made(tokens, of_row * rows, scores.tolist(), torch.arange(count) // size, columns)


def moved(whole, *, logps=None, reference=None):
    """The same completions with other sums, what changed spread evenly over their tokens."""
    tokens, new = whole.tokens, whole.logps if logps is None else logps
    wanted = whole.reference if reference is None else reference
    by_policy, by_reference = (
        ((after - before).detach() / whole.num_tokens).repeat_interleave(tokens.counts)
        for after, before in ((new, whole.logps), (wanted, whole.reference))
    )
    shifted = replace(
        tokens, logps=tokens.logps + by_policy, reference=tokens.reference + by_reference
    )
    return _as_leaves(replace(whole, logps=new, reference=wanted.detach(), tokens=shifted))


def part(whole, rows):
    """The rows of these numbers, in this order, as a micro-batch of their own."""
    owned = [(whole.rows == row).nonzero()[:, 0] for row in rows]
    own = torch.cat([*owned, whole.rows[:0]])
    counts = whole.tokens.counts
    spans = torch.arange(int(counts.sum())).split(counts.tolist())
    here = torch.cat([*(spans[completion] for completion in own.tolist()), counts[:0]])
    of_completions = ("logps", "reference", "num_tokens", "roles", "scores", "step_indices")
    of_tokens = ("logps", "reference", "values", "collision_logps")
    return Completions(
        **{name: getattr(whole, name)[own] for name in of_completions},
        rows=torch.arange(len(owned)).repeat_interleave(torch.tensor([*map(len, owned)]).long()),
        tokens=Tokens(
            counts=counts[own], **{name: getattr(whole.tokens, name)[here] for name in of_tokens}
        ),
        columns={name: values[list(rows)] for name, values in whole.columns.items()},
    )


def _as_leaves(whole):
    """The same numbers, those that a policy computes as leaves that collect a gradient."""
    tokens = replace(
        whole.tokens, logps=_leaf(whole.tokens.logps), values=_leaf(whole.tokens.values)
    )
    return replace(whole, logps=_leaf(whole.logps), tokens=tokens)


def _leaf(values):
    return values.detach().clone().requires_grad_()


def num_rows(whole):
    """How many rows these completions belong to."""
    return len(whole.rows.unique())


def step_of(whole, mismatched=(), pre_pass=None):
    """The facts of a step that consists of these completions."""
    return Step(
        rows=num_rows(whole),
        completions=len(whole.roles),
        tokens=int(whole.num_tokens.sum()),
        chosen_tokens=int(whole.num_tokens[is_good(whole)].sum()),
        mismatched=_tensor(mismatched),
        pre_pass=pre_pass or {},
    )


@dataclass(frozen=True)
class Taken:
    """What came out of a step."""

    losses: torch.Tensor  # (items,) in step order
    loss: float  # their global mean
    gradient: torch.Tensor  # (completions,) of the mean, by the sums that the policy gives
    token_gradient: torch.Tensor  # (tokens,) of the mean, by each token's log-prob, any way
    value_gradient: torch.Tensor  # (tokens,) of the mean, by each token's value
    values: dict  # name -> every value of the step, of a metric that counts them all
    means: dict  # of what the parts report, but for the loss
    line: dict  # as a trainer writes it
    reported: float | None  # the loss in it
    state: dict  # of the methods from here on


def take(method, whole, *, options=None, modifiers=None, **how):
    """Runs a step by one method; `how` is that of `take_objective`."""
    given = method.options() if options is None else options
    objective = Objective((Term(method, given),), modifiers or Modifiers())
    return take_objective(objective, whole, **how)


def take_objective(objective, whole, *, assignment=None, mismatched=(), state=None):
    """Runs a step as the trainer does: pre-pass, state, losses; sums first, and divides once.

    `assignment` lists the rows of each micro-batch.
    """
    assignment = assignment or [range(num_rows(whole))]
    micros = [_as_shown(part(whole, rows), objective) for rows in assignment]
    with torch.no_grad():
        found = [objective.pre_pass(micro) for micro in micros]
    order = torch.cat([micro.step_indices for micro in micros]).argsort()
    pre_pass = {name: torch.cat([one[name] for one in found])[order] for name in found[0]}
    step = step_of(whole, mismatched, pre_pass)
    now = objective.next_state(state or {}, step.pre_pass)
    for leaf in _leaves(whole):
        leaf.grad = None
    outcomes = []
    for micro in micros:
        outcome = objective.outcome(micro, step, now)
        outcome.loss.backward()
        outcomes.append(outcome)
    return _summed(objective, whole, micros, outcomes, now)


def _as_shown(micro, objective):
    """Only what the objective asks for, as the trainer makes only that."""
    if objective.head == "score":
        return replace(micro, tokens=None)
    needs = {
        "token_reference": "reference",
        "values": "values",
        "collision_logps": "collision_logps",
    }
    hidden = {name: None for need, name in needs.items() if need not in objective.needs}
    return replace(micro, tokens=replace(micro.tokens, **hidden))


def _summed(objective, whole, micros, outcomes, state):
    totals, counts, values = Counter(), {}, {}
    for outcome in outcomes:
        for name, metric in outcome.metrics.items():
            one = metric if isinstance(metric, Mean) else Mean.of(metric)
            assert not one.total.requires_grad, name
            totals[name] += one.total.item()
            counts[name] = counts.get(name, 0.0) + float(one.count)
            if not isinstance(metric, Mean):
                values[name] = torch.cat([values.get(name, metric[:0]), metric])
    sums = {name: Mean(totals[name], count) for name, count in counts.items() if count}
    by_completion, by_token, by_value = (
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
        for leaf in _leaves(whole)
    )
    line = objective.reported(sums)
    return Taken(
        losses=_in_step_order(micros, [outcome.losses for outcome in outcomes]),
        loss=sum(outcome.loss.item() for outcome in outcomes),
        gradient=by_completion,
        token_gradient=by_token + by_completion.repeat_interleave(whole.tokens.counts),
        value_gradient=by_value,
        values=values,
        means={name: one.value for name, one in sums.items() if not name.startswith("loss")},
        line=line,
        reported=line.get("loss"),
        state=state,
    )


def _in_step_order(micros, losses):
    """Losses of rows or of completions, wherever the rows were dealt to."""
    indices = [
        micro.step_indices
        if len(own) == len(micro.step_indices)
        else micro.step_indices[micro.rows.diff(prepend=micro.rows[:1] - 1) != 0]
        for micro, own in zip(micros, losses, strict=True)
    ]
    return torch.cat(losses)[torch.cat(indices).argsort()]


def _leaves(whole):
    return (whole.logps, whole.tokens.logps, whole.tokens.values)


def _tensor(values):
    return torch.tensor(values, dtype=torch.float64)
