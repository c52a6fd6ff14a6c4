"""Log-probabilities from hidden states without ever holding the logits.

    logp(y) = z_y - logsumexp_v z_v,   z = softcap * tanh(scale * (W h + b) / softcap)

Tiles of (positions, vocabulary) are projected, reduced to one float32 log-sum-exp per position
and overwritten, so peak memory grows with neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

HEAD_VERSION = "fused-1 float32"
# On a CPU a tile and its softmax should stay in the cache; a GPU wants larger products.
TILE_ROWS = {"cpu": 1024, "cuda": 2048}
TILE_VOCABULARY = {"cpu": 1024, "cuda": 2048}  # 4M elements at most


@dataclass(frozen=True)
class HeadSpec:
    """What happens to a logit after the projection."""

    scale: float = 1.0
    softcap: float = 0.0  # 0: none


@dataclass(frozen=True)
class OutputHead:
    """The projection to the vocabulary."""

    weight: Tensor  # (vocabulary, hidden)
    bias: Tensor | None  # (vocabulary,)
    spec: HeadSpec


def fused_logps(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, spec: HeadSpec
) -> Tensor:
    """Log p of `targets` (T,) given `hidden` (T, hidden): (T,) float32."""
    logps = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    rows = TILE_ROWS.get(hidden.device.type, 2048)
    tiles = _Tiles.like(hidden, min(rows, len(targets)))
    for start in range(0, len(targets), rows):
        states, wanted = hidden[start : start + rows], targets[start : start + rows]
        chosen = _target_logits(states, weight, bias, wanted, spec)
        logps[start : start + rows] = chosen - _logsumexp(states, weight, bias, spec, tiles)
    return logps


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


@dataclass(frozen=True)
class _Tiles:
    """Two buffers that every tile of a call reuses."""

    logits: Tensor  # (rows * vocabulary,) float32
    softmax: Tensor  # (rows * vocabulary,) float32
    width: int

    @staticmethod
    def like(hidden: Tensor, rows: int) -> _Tiles:
        width = TILE_VOCABULARY.get(hidden.device.type, 2048)
        buffers = torch.empty(2, rows * width, dtype=torch.float32, device=hidden.device)
        return _Tiles(buffers[0], buffers[1], width)


def _logsumexp(
    states: Tensor, weight: Tensor, bias: Tensor | None, spec: HeadSpec, tiles: _Tiles
) -> Tensor:
    """One log-sum-exp per tile, then over tiles: (rows,) float32."""
    parts: list[Tensor] = []
    states = _operand(states)
    for start in range(0, len(weight), tiles.width):
        columns = weight[start : start + tiles.width]
        shape = (len(states), len(columns))
        logits = tiles.logits[: shape[0] * shape[1]].view(shape)
        _project(states, columns, logits)
        if bias is not None:
            logits += bias[start : start + tiles.width]
        _shape_logits(logits, spec)
        softmax = tiles.softmax[: shape[0] * shape[1]].view(shape)
        # One pass over a tile in cache; z_0 - log_softmax(z)_0 is its log-sum-exp.
        torch.log_softmax(logits, dim=1, out=softmax)
        parts.append(logits[:, 0] - softmax[:, 0])
    return torch.logsumexp(torch.stack(parts), dim=0)


def _target_logits(
    states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, spec: HeadSpec
) -> Tensor:
    logits = torch.linalg.vecdot(states.float(), weight[targets].float())
    if bias is not None:
        logits = logits + bias[targets]
    return _shape_logits(logits, spec)


def _operand(states: Tensor) -> Tensor:
    """GPUs multiply half precision with float32 accumulation; CPUs need float32 operands."""
    return states if states.is_cuda else states.float()


def _project(states: Tensor, columns: Tensor, out: Tensor) -> None:
    if states.dtype == torch.float32:
        torch.mm(states, columns.float().t(), out=out)
    else:
        out.copy_(torch.mm(states, columns.t(), out_dtype=torch.float32))


def _shape_logits(logits: Tensor, spec: HeadSpec) -> Tensor:
    """Scales and caps in place."""
    if spec.scale != 1.0:
        logits *= spec.scale
    if spec.softcap:
        logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return logits
