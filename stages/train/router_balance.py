"""Load balance of a mixture of experts over a whole optimizer step: router loss and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...schemas.methods import Mean


@dataclass(frozen=True)
class RouterSums:
    """The columns of a policy's `routing`, layer by layer."""

    tokens: Tensor  # (layers, experts): tokens routed to each expert
    probabilities: Tensor  # (layers, experts): sums over all tokens
    entropy: Tensor  # (layers,): the sum over all tokens
    count: Tensor  # (layers,): the number of tokens


def router_sums(routing: Tensor) -> RouterSums:
    """The columns of a policy's `routing` by name."""
    experts = routing.shape[1] // 2 - 1
    return RouterSums(
        tokens=routing[:, :experts],
        probabilities=routing[:, experts:-2],
        entropy=routing[:, -2],
        count=routing[:, -1],
    )


def partial_router_loss(own: Tensor, step: Tensor) -> Tensor:
    """The part of the step's router loss that a micro-batch adds, with the gradient: ().

    The loss is the mean over layers of E sum_e f_e P_e. f_e is the fraction of the step's tokens
    that go to expert e, P_e the mean of its probability over them, and f has no gradient. So it is
    a sum over tokens once f is known for the whole step. https://arxiv.org/abs/2101.03961
    """
    whole = router_sums(step)
    experts = whole.tokens.shape[1]
    tokens_squared = whole.count.clamp(min=1.0).square()
    products = (whole.tokens * router_sums(own).probabilities).sum(dim=1)
    return (experts * products / tokens_squared).mean()


def router_facts(step: Tensor) -> dict[str, Mean[Tensor]]:
    """Router metrics over all tokens of a step or an evaluation.

    Each counts once, or not at all if there is no token.
    """
    whole = router_sums(step)
    count = whole.count.clamp(min=1.0)
    values = {
        "router/loss": partial_router_loss(step, step),
        "router/entropy": (whole.entropy / count).mean(),
        "router/busiest": (whole.tokens / count[:, None]).max(),
        "router/unused": (whole.tokens == 0).double().mean(),
    }
    times = (whole.count > 0).all().double()
    return {name: Mean(value * times, times) for name, value in values.items()}
