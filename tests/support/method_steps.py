"""Optimizer steps for losses: branches made by hand or by chance, run as a trainer would."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from align.schemas.methods import Branches, Step
from align.schemas.rows import Role

ROLES = {"paired": (Role.CHOSEN, Role.REJECTED), "labelled": (Role.DESIRABLE, Role.UNDESIRABLE)}


def branches(logps, reference=None, *, num_tokens=None, roles):
    """Branches of plain numbers; the log-probs are a leaf that collects a gradient."""
    zeros, ones = [0.0] * len(logps), [1.0] * len(logps)
    return Branches(
        logps=torch.tensor(logps, dtype=torch.float64, requires_grad=True),
        reference=torch.tensor(reference or zeros, dtype=torch.float64),
        num_tokens=torch.tensor(num_tokens or ones, dtype=torch.float64),
        roles=torch.tensor(roles, dtype=torch.int8),
        scores=torch.full((len(logps),), torch.nan, dtype=torch.float64),
        rows=torch.arange(len(logps)) // 2,
    )


def pair(chosen, rejected, reference=(0.0, 0.0), num_tokens=(1.0, 1.0)):
    """One row: log-probs of its chosen and its rejected branch."""
    roles = ROLES["paired"]
    return branches([chosen, rejected], list(reference), num_tokens=list(num_tokens), roles=roles)


def random_branches(kind, rows, seed=0, *, roles=None):
    """Two branches per row, with log-ratios of a few nats around zero."""
    made = torch.Generator().manual_seed(seed)
    count = 2 * rows
    num_tokens = torch.randint(3, 40, (count,), generator=made).double()
    logps = -num_tokens * (0.2 + 2 * torch.rand(count, generator=made, dtype=torch.float64))
    ratios = 4 * torch.randn(count, generator=made, dtype=torch.float64)
    return branches(
        logps.tolist(),
        (logps - ratios).tolist(),
        num_tokens=num_tokens.tolist(),
        roles=(roles or ROLES[kind]) * rows,
    )


def part(whole, start, stop):
    """The rows from `start` to `stop`, two branches each, as a micro-batch of their own."""
    both = slice(2 * start, 2 * stop)
    names = ("logps", "reference", "num_tokens", "roles", "scores", "rows")
    return Branches(**{name: getattr(whole, name)[both] for name in names})


def step_of(whole, mismatched=()):
    """The facts of a step that consists of these branches."""
    is_chosen = (whole.roles == Role.CHOSEN) | (whole.roles == Role.DESIRABLE)
    return Step(
        rows=len(whole.roles) // 2,
        branches=len(whole.roles),
        tokens=int(whole.num_tokens.sum()),
        chosen_tokens=int(whole.num_tokens[is_chosen].sum()),
        mismatched=torch.tensor(mismatched, dtype=torch.float64),
    )


@dataclass(frozen=True)
class Taken:
    """What came out of a step."""

    losses: torch.Tensor  # (items,)
    loss: float  # their global mean
    gradient: torch.Tensor  # (branches,) of the mean by the policy's log-probs
    metrics: dict  # name -> every value of the step
    means: dict


def take(method, whole, *, cuts=(), mismatched=(), options=None):
    """Runs a step in micro-batches that end at the rows `cuts`, sums, and divides once."""
    step = step_of(whole, mismatched)
    whole.logps.grad = None
    losses, metrics = [], {}
    edges = [0, *cuts, step.rows]
    for start, stop in pairwise(edges):
        given = method.options() if options is None else options
        output = method.loss(part(whole, start, stop), step, given)
        (output.losses.sum() / max(1, getattr(step, method.items))).backward()
        losses.append(output.losses.detach())
        for name, values in output.metrics.items():
            assert not values.requires_grad, name
            metrics[name] = torch.cat([metrics.get(name, values[:0]), values])
    joined = torch.cat(losses)
    means = {name: values.mean().item() for name, values in metrics.items() if len(values)}
    loss = joined.sum().item() / max(1, getattr(step, method.items))
    return Taken(joined, loss, whole.logps.grad.clone(), metrics, means)
