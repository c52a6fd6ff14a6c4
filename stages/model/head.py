"""Log-probabilities from hidden states without ever holding all logits.

    logp(y) = z_y - logsumexp_v z_v,   z = softcap * tanh(scale * (W h + b) / softcap)

Tiles of (positions, vocabulary) are projected, reduced to one float32 log-sum-exp per position
and overwritten, or kept for the backward pass as far as there is room, so peak memory grows with
neither. Where it is asked for, so is

    purity = log sum_v p_v ** 2 = logsumexp_v 2 z_v - 2 logsumexp_v z_v
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .head_grad import FusedLogps
from .kept import LogitsRoom
from .tiles import HeadSpec, OutputHead

if TYPE_CHECKING:
    from torch import Tensor

HEAD_VERSION = "fused-2 float32"


def fused_rows(head: OutputHead, hidden: Tensor, targets: Tensor, *, purity: bool) -> Tensor:
    """Log p of `targets` (T,) given `hidden` (T, hidden), and its gradient: (1, T) float32.

    Where it is asked for, a second row is purity, without a gradient.
    """
    room = head.room if torch.is_grad_enabled() else None
    rows: Tensor = FusedLogps.apply(  # type: ignore[no-untyped-call]
        hidden, targets, purity, head.weight, head.bias, head.spec, room
    )
    return rows


class LogpHead(nn.Linear):
    """An output embedding that answers as `fused_rows` when it is given targets.

    It has to be called: ZeRO-3 gathers a module's weight around its call and nowhere else.
    """

    spec: HeadSpec
    room: LogitsRoom

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, *, purity: bool = False
    ) -> Tensor:
        """`fused_rows` of `targets` given `hidden` (T, hidden); without targets the projection."""
        if targets is None:
            return super().forward(hidden)
        head = OutputHead(self.weight, self.bias, self.spec, self.room)
        return fused_rows(head, hidden, targets, purity=purity)


def call_head_for_logps(model: Any) -> None:
    """Makes a LogpHead of the model's head, in place, so that names and ties stay as they are."""
    layer = model.get_output_embeddings()
    layer.__class__ = LogpHead
    layer.spec = head_spec(model.config)
    layer.room = LogitsRoom()


def output_head(model: Any) -> OutputHead | None:
    """The head of a causal model; None where it is more than a plain projection."""
    layer = model.get_output_embeddings()
    # An adapter on the head is a wrapper whose `weight` lacks the adapter.
    if not isinstance(layer, nn.Linear) or layer.weight.is_meta:
        return None
    return OutputHead(layer.weight, layer.bias, head_spec(model.config))


def head_spec(config: Any) -> HeadSpec:
    """Reads scale and softcap as Cohere, Granite and Gemma 2 spell them."""
    config = config.get_text_config(decoder=True)
    divisor = _number(config, "logits_scaling", 1.0)
    scale = _number(config, "logit_scale", 1.0) / divisor
    return HeadSpec(scale=scale, softcap=_number(config, "final_logit_softcapping", 0.0))


def _number(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else default
