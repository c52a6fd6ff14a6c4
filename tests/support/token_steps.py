"""Rows made token by token, for methods and modifiers that look at single tokens."""

from dataclasses import dataclass, replace

import torch

from align.schemas.methods import Branches, Tokens
from align.schemas.rows import Role

PAIR = (Role.CHOSEN, Role.REJECTED)
LABELS = (Role.DESIRABLE, Role.UNDESIRABLE)


@dataclass(frozen=True)
class Said:
    """A completion: what its tokens are to the policy and the reference, and its score."""

    ratios: tuple  # log(policy / reference) of each token
    score: float = 0.0
    values: tuple = ()  # of each token; all 0 if left out
    logps: tuple = ()  # the policy's; all -2 if left out
    purity: tuple = ()  # log sum of p^2; all -1 if left out


def rows_of(*rows, roles=(Role.CANDIDATE,) * 99, columns=None):
    """Branches of rows, each a list of `Said`; the policy's numbers collect gradients."""
    said = [one for row in rows for one in row]
    counts = torch.tensor([len(one.ratios) for one in said], dtype=torch.int64)
    ratios = _joined(said, "ratios", 0.0)
    logps = _joined(said, "logps", -2.0)
    tokens = Tokens(
        counts=counts,
        logps=logps.clone().requires_grad_(),
        reference=logps - ratios,
        values=_joined(said, "values", 0.0).requires_grad_(),
        purity=_joined(said, "purity", -1.0),
    )
    return Branches(
        logps=_sums(logps, counts).requires_grad_(),
        reference=_sums(logps - ratios, counts),
        num_tokens=counts.double(),
        roles=torch.tensor([role for row in rows for role in roles[: len(row)]], dtype=torch.int8),
        scores=torch.tensor([one.score for one in said], dtype=torch.float64),
        rows=torch.arange(len(rows)).repeat_interleave(
            torch.tensor([len(row) for row in rows], dtype=torch.int64)
        ),
        places=torch.arange(len(said)),
        tokens=tokens,
        columns={
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in (columns or {}).items()
        },
    )


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
            purity=tuple(-0.1 - abs(x) for x in normal(count)),
        )

    return [[said() for _ in range(size)] for size in sizes]


def slopes_of(rows, name, loss_of):
    """Of each token, by how much `loss_of` rows changes with this number of it."""
    return [
        (loss_of(_nudged(rows, place, name, 1e-6)) - loss_of(_nudged(rows, place, name, -1e-6)))
        / 2e-6
        for place in range(sum(len(said.ratios) for row in rows for said in row))
    ]


def _nudged(rows, place, name, by):
    """The rows with one number of one token changed."""
    turned, seen = [], 0
    for row in rows:
        turned.append([])
        for said in row:
            values = list(getattr(said, name))
            if seen <= place < seen + len(values):
                values[place - seen] += by
            seen += len(values)
            turned[-1].append(replace(said, **{name: tuple(values)}))
    return turned


def _joined(said, name, otherwise):
    values = [getattr(one, name) or (otherwise,) * len(one.ratios) for one in said]
    return torch.tensor([value for of_one in values for value in of_one], dtype=torch.float64)


def _sums(values, counts):
    return torch.tensor([one.sum() for one in values.split(counts.tolist())], dtype=torch.float64)
