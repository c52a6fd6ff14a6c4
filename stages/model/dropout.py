"""Takes the randomness out of a model's training mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.modules.dropout import _DropoutNd

if TYPE_CHECKING:
    from torch import nn

RANDOM = ("drop", "jitter")  # as in attention_dropout, resid_pdrop, layerdrop, router_jitter_noise


def turn_dropout_off(model: nn.Module) -> None:
    """Sets every probability to zero, where modules keep it and where they may read it."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        _set_to_zero(module)
        if (config := getattr(module, "config", None)) is not None:
            _set_to_zero(config)


def _set_to_zero(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and any(word in name for word in RANDOM):
            setattr(owner, name, 0.0)
