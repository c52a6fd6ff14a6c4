"""Says which tokens a token of a tree may see, in the form each model family takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from .trees import TreeBatch

FULL, SLIDING = "full_attention", "sliding_attention"


def tree_mask(batch: TreeBatch, config: Any, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Additive masks (trees, 1, length, length): one, or one per kind of layer."""
    visible = visible_keys(batch)
    masks = {
        kind: _additive(visible & _within(batch, window), dtype)
        for kind, window in windows_by_kind(config).items()
    }
    return next(iter(masks.values())) if len(masks) == 1 else masks


def visible_keys(batch: TreeBatch) -> Tensor:
    """A token sees the prompt and its own branch, up to itself: (trees, length, length) bool."""
    query, key = batch.segments[:, :, None], batch.segments[:, None, :]
    length = batch.segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    # A padding token sees itself, so no row of the softmax is empty.
    return ((query == key) | (key == 0)) & causal


def windows_by_kind(config: Any) -> dict[str, int | None]:
    """The window of each kind of attention layer; a single kind takes a single mask."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {FULL, SLIDING}:
        raise ValueError(f"layers of kind {sorted(unknown)} have no tree mask")
    if not kinds:
        return {SLIDING if window else FULL: window}
    if SLIDING not in kinds:
        return {FULL: None}
    return {FULL: None, SLIDING: window}


def _within(batch: TreeBatch, window: int | None) -> Tensor:
    """Position distance, not index distance: branches restart at the end of the prompt."""
    length = batch.positions.shape[1]
    if window is None or window >= length:
        return torch.ones((), dtype=torch.bool, device=batch.positions.device)
    return batch.positions[:, :, None] - batch.positions[:, None, :] < window


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Float, because every eager path takes it and sdpa would convert a bool in each layer."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)
