"""A model in float32 for a while, without losing a bit of what it was."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def held_in_float32(model: nn.Module) -> Iterator[None]:
    """Widens every half-precision weight inside; after it the very same tensors are back."""
    every = chain(model.parameters(), model.buffers())
    halves = [tensor for tensor in every if tensor.dtype in HALVES]
    # Kept rather than cast back: putting them back needs no memory, so it cannot fail.
    kept = [tensor.data for tensor in halves]
    try:
        for tensor in halves:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, before in zip(halves, kept, strict=True):
            tensor.data = before
