"""Activation offloading: the inputs that gradient checkpointing keeps, in the CPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def keeps_on_host(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """The checkpoint function with layer inputs offloaded to the CPU until their backward."""

    @wraps(checkpoint)
    def call(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(_to_host, _to_device):
            return checkpoint(*args, **kwargs)

    return call


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    # Masks and positions are shared by all layers: copies would only take memory.
    if tensor.device.type == "cpu" or not tensor.requires_grad:
        return tensor
    # Copies to pinned memory do not block; the compute stream orders them.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, host.copy_(tensor.detach(), non_blocking=True)


def _to_device(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, host = kept
    return host.to(device, non_blocking=True)
