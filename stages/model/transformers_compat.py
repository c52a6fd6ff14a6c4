"""What is taken of transformers beside its public names, and what differs between its versions.

Its modelling code has losses for object detection that load scipy wherever it is installed, which
costs any other model 36 MiB. They are imported here as if it were not.
"""

from __future__ import annotations

from typing import Any

from transformers import utils

__all__ = ["AttentionInterface", "attention_of", "recompute_activations"]

_utils: Any = utils
_is_scipy_available = _utils.is_scipy_available
_utils.is_scipy_available = lambda: False
try:
    from transformers.modeling_utils import AttentionInterface
finally:
    _utils.is_scipy_available = _is_scipy_available


def attention_of(model: Any) -> str:
    """The name of the attention that a model computes with."""
    name: str | None = model.config._attn_implementation
    return name or "eager"


def recompute_activations(model: Any) -> None:
    """Keeps what enters a layer only, and runs the layer again for its gradient."""
    # The name changes within the versions that pyproject.toml allows; the older one warns later on.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
