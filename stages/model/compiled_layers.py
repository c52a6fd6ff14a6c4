"""Decoder layers, each compiled by torch: what lies between its products becomes few kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from .made_classes import with_forward
from .transformers_compat import (
    decoder_layers,
    forward_without_checkpointing,
    is_quantized,
    routers_of,
)

# More than the models, dtypes and kinds of gradients of one process make together; past torch's own
# limit of 8 it would leave the next uncompiled, or refuse it.
COMPILATIONS = 1024


def allow_compilations() -> None:
    """Raises torch's limits of how often one function may be compiled, which each thread has."""
    limits: Any = torch.compiler.config
    if limits.recompile_limit < COMPILATIONS:  # each layer asks, and to look takes microseconds
        for name in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(limits, name, max(getattr(limits, name), COMPILATIONS))


def use_layers(model: Any, compiler: str) -> None:
    """Makes the decoder layers those that torch compiles with this backend; "": the model's own."""
    for layer in decoder_layers(model):
        own = _OWN.get(type(layer), type(layer))
        wanted = _compiled_kind(own, compiler) if compiler else own
        if type(layer) is not wanted:
            layer.__class__ = wanted


def why_not_compiled(model: Any) -> str:
    """The reason why the layers of a model cannot be compiled; "" if there is none."""
    layers = decoder_layers(model)
    if not layers:
        return "its decoder layers are not found"
    if is_quantized(model):
        return "its weights are quantized"
    if routers_of(model):
        return "the routers of its experts are watched inside of layers"
    # accelerate replaces the `forward` of what it moves between devices.
    if any("forward" in vars(module) for layer in layers for module in layer.modules()):
        return "weights or states are moved between devices inside of its layers"
    return ""


_OWN: dict[type, type] = {}  # the model's own class of a layer, by the class that is compiled


@cache
def _compiled_kind(kind: type[nn.Module], compiler: str) -> type[nn.Module]:
    """A subclass of this class of layers with a compiled `forward`.

    All its layers share one function, so they share its graphs. It is a class because transformers
    puts gradient checkpointing around the `forward` of a class: that stays outside of the graph.
    """
    # One graph or an error, which the probe tells: a layer in parts would be no faster.
    run: Callable[..., Any] = torch.compile(
        forward_without_checkpointing(kind), dynamic=True, fullgraph=True, backend=compiler
    )

    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        allow_compilations()  # of this thread: torch's own run backward passes
        return run(self, *given, **named)

    compiled = with_forward(kind, forward, _compiled_kind, compiler)
    _OWN[compiled] = kind
    return compiled
