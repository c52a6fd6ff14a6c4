"""Decoder layers, each compiled by torch: what lies between its products becomes few kernels."""

from __future__ import annotations

from typing import Any

import torch

from ...schemas.errors import UsageError
from .transformers_compat import decoder_layers

# More than the models, dtypes and kinds of gradients of one process make together; past torch's own
# limit of 8 it would leave the next uncompiled, or refuse it.
COMPILATIONS = 1024


def allow_compilations() -> None:
    """Raises torch's limits of how often one function may be compiled."""
    limits: Any = torch.compiler.config
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(limits, name, max(getattr(limits, name), COMPILATIONS))


def compile_layers(model: Any, compiler: str = "inductor") -> None:
    """Compiles each decoder layer in place, for inputs of any length; `compiler`: torch's name."""
    allow_compilations()
    layers = decoder_layers(model)
    if not layers:
        raise UsageError(
            f"model.compile: {type(model).__name__} has no decoder layers here. Set it to false."
        )
    for layer in layers:
        layer.compile(dynamic=True, backend=compiler)


def is_compiled(model: Any) -> bool:
    """Whether a pass through the layers runs what torch has compiled."""
    return any(layer._compiled_call_impl is not None for layer in decoder_layers(model))
