"""Update rules of our own optimizers, Lion and Muon, which run on every device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Lion: the sign of an interpolation of momentum and gradient, with a single moment.

    `w -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * w)`, then `m = b2 * m + (1 - b2) * g`.

    https://arxiv.org/abs/2302.06675
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: Sequence[float], weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[weight], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(weight)
        moment: Tensor = state["exp_avg"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(moment.lerp(gradient, 1 - beta1).sign_(), alpha=-group["lr"])
        moment.lerp_(gradient, 1 - beta2)


MOMENTUM = 0.95  # of the matrices, Nesterov momentum
ROUNDS = 5  # Newton-Schulz iterations
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MATCHING = 0.2  # the root mean square of an update of AdamW


class Muon(torch.optim.Optimizer):
    """Muon: orthogonalized momentum for the matrices of groups with `orthogonal`; else AdamW.

    `m = 0.95 * m + 0.05 * g`, `o = orthogonal(0.05 * g + 0.95 * m)`, and
    `w -= lr * (0.2 * sqrt(max(rows, columns)) * o + weight_decay * w)`: the factor makes an update
    as long as one of AdamW, so that one learning rate fits both.

    https://arxiv.org/abs/2502.16982
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"orthogonal": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            direction = self._orthogonal if group["orthogonal"] else self._adam
            for weight in group["params"]:
                if weight.grad is not None:
                    update = direction(weight, weight.grad, group)
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"])

    def _orthogonal(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum: Tensor = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        scale = MATCHING * max(weight.shape[-2:]) ** 0.5
        update: Tensor = orthogonalized(gradient.lerp(momentum, MOMENTUM)).mul_(scale)
        return update

    def _adam(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state, (beta1, beta2) = self.state[weight], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(weight))
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        first: Tensor = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second: Tensor = state["exp_avg_sq"].mul_(beta2)
        second.addcmul_(gradient, gradient, value=1 - beta2)
        spread = (second / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        update: Tensor = first / (1 - beta1 ** state["step"]) / spread
        return update


def orthogonalized(matrix: Tensor) -> Tensor:
    """An approximation of the nearest orthogonal matrix, over the last two dimensions.

    Five Newton-Schulz iterations bring the singular values near 1. A GPU computes them in
    bfloat16, which is enough: they end between 0.7 and 1.2 anyway.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    found: Tensor = (x.mT if is_tall else x).to(matrix.dtype)
    return found
