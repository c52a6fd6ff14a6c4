"""Router statistics of a mixture of experts: token counts, probabilities and entropies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
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

logger = logging.getLogger("align")

# In the config of every model that transformers has a load-balancing loss for.
COEFFICIENT = "router_aux_loss_coef"


class RouterWatch:
    """Sums of the routers' outputs in a pass; false for a model without routers."""

    def __init__(self, model: nn.Module, *, learns: bool, run: Callable[[], Any]) -> None:
        """`learns`: whether the sums have a gradient. `run` is a pass of the model."""
        self.layers = self.experts = self.chosen = 0
        self._learns = learns
        self._seen: list[Any] | None = None  # the routers' outputs in the pass that is watched
        hooks = [router.register_forward_hook(self._see) for router in routers_of(model)]
        if hooks and not self._understands(run):
            logger.warning("The routers of this mixture of experts are of no known form.")
            for hook in hooks:
                hook.remove()

    def __bool__(self) -> bool:
        return self.layers > 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records the pass inside, not the layers that run again for their gradient later on."""
        self._seen = []
        try:
            yield
        finally:
            self._seen = None

    def sums(self, counted: Tensor) -> Tensor:
        """Sums over the tokens where `counted`, (all,) bool: (layers, 2 * experts + 2) float64.

        The columns are the tokens routed to each expert, the sum of each expert's probabilities,
        the sum of the entropies, and the number of tokens.
        """
        assert self._seen, "the pass is inside, and its routers run"
        return torch.stack(
            [
                _sums_of(logits if self._learns else logits.detach(), chosen, counted)
                for logits, _, chosen in self._seen
            ]
        )

    def _see(self, _router: nn.Module, _inputs: Any, outputs: Any) -> None:
        # Only recorded: when a layer runs again, it has to do what it did the first time.
        if self._seen is not None:
            self._seen.append(outputs)

    def _understands(self, run: Callable[[], Any]) -> bool:
        with self.watching():
            run()
            shapes = [_shape_of(outputs) for outputs in self._seen or ()]
        shape = shapes[0] if len(set(shapes)) == 1 else None
        if shape is None:
            return False
        self.layers, (self.experts, self.chosen) = len(shapes), shape
        return True


def _shape_of(outputs: Any) -> tuple[int, int] | None:
    """(experts, experts per token) of a router that returns (logits, weights, choices)."""
    if not isinstance(outputs, tuple) or len(outputs) != 3:
        return None
    logits, _, chosen = outputs
    if not logits.is_floating_point() or chosen.is_floating_point() or chosen.ndim != 2:
        return None
    return logits.shape[-1], chosen.shape[-1]


def _sums_of(logits: Tensor, chosen: Tensor, counted: Tensor) -> Tensor:
    """The sums of one layer's router: (2 * experts + 2,) float64."""
    probabilities = torch.softmax(logits.flatten(0, -2).float(), dim=-1)
    of_experts = probabilities.masked_fill(~counted[:, None], 0.0).sum(0, dtype=torch.float64)
    with torch.no_grad():
        entropies = torch.special.entr(probabilities).sum(-1).masked_fill(~counted, 0.0)
        ones = counted.double()
        tokens = torch.zeros_like(of_experts)
        tokens.scatter_add_(0, chosen.flatten(), ones.repeat_interleave(chosen.shape[-1]))
        rest = torch.stack([entropies.sum(dtype=torch.float64), ones.sum()])
    return torch.cat([tokens, of_experts, rest])


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
