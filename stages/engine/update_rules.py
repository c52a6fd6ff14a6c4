"""Optimizers that neither torch nor DeepSpeed has in a form that runs on every device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """The sign of a mixture of momentum and gradient; one moment only.

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
