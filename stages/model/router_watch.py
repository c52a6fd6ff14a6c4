"""Sums of a mixture's router outputs over the tokens of a pass, for the load-balancing loss."""

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
from .transformers_compat import routers_of
from .tree_attention import PAD, TreeBatch


class RouterWatch:
    """Records the outputs of a model's routers in a pass, and sums them."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[Any] = []  # the routers' outputs in the pass that is watched
        self._is_watching = False
        routers = routers_of(model)
        if not routers:
            raise UsageError(
                f"train.router_loss: {type(model).__name__} has no router to balance. Set it to 0."
            )
        for router in routers:
            router.register_forward_hook(self._see)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records the pass in the block, but not layers that are recomputed later."""
        self._seen, self._is_watching = [], True
        try:
            yield
        except BaseException:
            self._seen = []  # otherwise a failed batch would stay in memory
            raise
        finally:
            self._is_watching = False

    def _see(self, _router: nn.Module, _inputs: Any, outputs: Any) -> None:
        # Only recorded: a recomputed layer must do the same operations.
        if self._is_watching:
            self._seen.append(outputs)

    def sums(self, trees: Sequence[Tree], batch: TreeBatch, *, has_copies: bool) -> Tensor:
        """Sums over the tokens of the trees that were watched: (layers, 2 * experts + 1) float64.

        The sums are the tokens routed to each expert, each expert's probabilities, and the number
        of tokens. If each branch has a row with a copy of the prompt, only the first copy counts.
        """
        counted = batch.segments != PAD
        if not trees:  # a rank without rows runs a made-up batch
            counted = torch.zeros_like(counted)
        elif has_copies:
            is_copy = np.array([at > 0 for tree in trees for at in range(len(tree.branches))])
            is_prompt = batch.segments == 0
            counted = counted & ~(on_device(is_copy, counted.device)[:, None] & is_prompt)
        seen, self._seen = self._seen, []
        return torch.stack([_sums_of(outputs, counted.flatten()) for outputs in seen])


def _sums_of(outputs: Any, counted: Tensor) -> Tensor:
    """The sums of one router's outputs."""
    if not isinstance(outputs, tuple) or len(outputs) != 3 or outputs[2].is_floating_point():
        raise UsageError(
            "train.router_loss: the routers of this model do not return logits, weights and "
            "choices. Set it to 0."
        )
    logits, _, chosen = outputs
    probabilities = torch.softmax(logits.flatten(0, -2).float(), dim=-1)
    of_experts = probabilities.masked_fill(~counted[:, None], 0.0).sum(0, dtype=torch.float64)
    ones = counted.double()
    tokens = torch.zeros_like(of_experts)
    tokens.scatter_add_(0, chosen.flatten(), ones.repeat_interleave(chosen.shape[-1]))
    return torch.cat([tokens, of_experts, ones.sum()[None]])
