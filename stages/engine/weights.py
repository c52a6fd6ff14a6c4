"""The whole policy on one CPU, however it is spread."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from .quiet import deepspeed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

WRAPPED = "model."  # where the policy holds the model whose names are used


def whole_weights(policy: nn.Module, *, rank: int, trainable_only: bool) -> Mapping[str, Tensor]:
    """Parameters, tied ones once, and saved buffers; every rank calls it, rank 0 gets them.

    What the policy has beside the model keeps its own name: `value_head.weight`.
    """
    weights = {}
    for name, tensor in _tensors(policy):
        if trainable_only and not tensor.requires_grad:
            continue
        # One at a time, so that no device ever holds the whole of a partitioned model.
        with _gathered(tensor):
            if rank == 0:
                weights[name.removeprefix(WRAPPED)] = tensor.detach().to("cpu", copy=True)
    return weights


def _tensors(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from policy.named_parameters()
    saved = policy.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in policy.named_buffers() if name in saved)


def _gathered(tensor: Tensor) -> Any:
    if not hasattr(tensor, "ds_id"):
        return nullcontext()
    return deepspeed.zero.GatheredParameters([tensor])
