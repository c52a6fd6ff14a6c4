"""Sums of a mixture's routers over the tokens of a pass, for the loss that balances its experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...schemas.errors import UsageError
from ...schemas.rows import Tree
from .copies import on_device
from .layouts.tree_attention import PAD, TreeBatch
from .transformers_compat import routers_of

# In the config of every model that transformers has a load-balancing loss for.
COEFFICIENT = "router_aux_loss_coef"


class RouterWatch:
    """Records what the routers of a model give in a pass."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[Any] | None = None  # the routers' outputs in the pass that is watched
        for router in routers_of(model):
            router.register_forward_hook(self._see)

    @contextmanager
    def watching(self) -> Iterator[list[Any]]:
        """Records the pass inside, not the layers that run again for their gradient later on."""
        self._seen = list[Any]()
        try:
            yield self._seen
        finally:
            self._seen = None

    def _see(self, _router: nn.Module, _inputs: Any, outputs: Any) -> None:
        # Only recorded: when a layer runs again, it has to do what it did the first time.
        if self._seen is not None:
            self._seen.append(outputs)


def sums_of(outputs: Any, counted: Tensor) -> Tensor:
    """Sums of one router's outputs over the tokens where `counted`: (2 * experts + 1,) float64.

    They are the tokens routed to each expert, the sum of each expert's probabilities, and the
    number of tokens.
    """
    if not isinstance(outputs, tuple) or len(outputs) != 3 or outputs[2].is_floating_point():
        raise UsageError(
            "train.router_loss: the routers of this model give no logits, weights and choices. Set "
            "it to 0."
        )
    logits, _, chosen = outputs
    probabilities = torch.softmax(logits.flatten(0, -2).float(), dim=-1)
    of_experts = probabilities.masked_fill(~counted[:, None], 0.0).sum(0, dtype=torch.float64)
    ones = counted.double()
    tokens = torch.zeros_like(of_experts)
    tokens.scatter_add_(0, chosen.flatten(), ones.repeat_interleave(chosen.shape[-1]))
    return torch.cat([tokens, of_experts, ones.sum()[None]])


def counted_tokens(trees: Sequence[Tree], batch: TreeBatch, *, has_copies: bool) -> Tensor:
    """Mask of the positions that hold a token of the trees: (rows * length,) bool.

    Where each branch has a row with a copy of the prompt, only the first copy is in it.
    """
    counted = batch.segments != PAD
    if has_copies:
        is_copy = np.array([branch > 0 for tree in trees for branch in range(len(tree.branches))])
        is_prompt = batch.segments == 0
        counted = counted & ~(on_device(is_copy, counted.device)[:, None] & is_prompt)
    return counted.flatten()


def require_coefficient(config: Any, folder: str) -> None:
    """Refuses `train.router_loss` for a model that transformers has no such loss for."""
    if getattr(config, COEFFICIENT, None) is None:
        raise UsageError(
            f"{folder}: transformers has no load-balancing loss for {config.model_type} (its "
            f"config lacks {COEFFICIENT}): it is no mixture of experts, or one that is kept in "
            "balance in another way. Set train.router_loss to 0."
        )
