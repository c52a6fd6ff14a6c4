"""Reductions of a tile of logits on a GPU, each compiled into one pass over the tile.

A CPU has tiles that stay in its cache; a GPU reads and writes all of a tile in each operation that
is not fused with the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..memory.out_of_memory import is_out_of_memory

logger = logging.getLogger("align")


def log_sum_exp(logits: Tensor) -> Tensor:
    """Log of the sum of exponentials of each row: (rows,)."""
    return torch.logsumexp(logits, dim=1)


def log_purity(logits: Tensor) -> Tensor:
    """Log of sum p ** 2 of each row, as if there were no other tile: (rows,)."""
    return torch.logsumexp(2 * logits, dim=1) - 2 * torch.logsumexp(logits, dim=1)


def deviations(
    logits: Tensor, logsumexp: Tensor, targets: Tensor, softcap: float, dtype: torch.dtype
) -> Tensor:
    """p_v - [v = y], times the slope of the softcap, in `dtype`: (rows, columns).

    `targets` (rows,) are counted from the tile's first token.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    found = (logits - logsumexp[:, None]).exp() - (columns[None, :] == targets[:, None]).float()
    if softcap:
        # d softcap * tanh(u / softcap) / du = 1 - tanh(u / softcap) ** 2
        found = found * (1 - (logits / softcap).square())
    return found.to(dtype)


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function compiled for tiles of any size, or itself where nothing can be compiled."""
    made = torch.compile(function, dynamic=True)
    chosen: list[Callable[..., Tensor]] = []

    def run(*arguments: Any) -> Tensor:
        if chosen:
            return chosen[0](*arguments)
        try:
            result: Tensor = made(*arguments)
        except Exception as error:  # a missing compiler shows itself in many ways
            if is_out_of_memory(error):
                raise
            logger.warning(
                "The output head is not compiled, which is slower: %s.", str(error).split("\n")[0]
            )
            chosen.append(function)
            return function(*arguments)
        chosen.append(made)
        return result

    return run
