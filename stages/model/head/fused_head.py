"""The fused output head: log-probabilities from hidden states, without all logits at once.

    logp(y) = z_y - logsumexp_v z_v,   z = softcap * tanh(scale * (W h + b) / softcap)

Tiles of (positions, vocabulary) are projected, reduced to one float32 log-sum-exp per position
and overwritten, or kept for the backward pass as far as a fixed buffer holds them, so peak memory
grows with neither. On request the log of the sum of squared probabilities is computed too:

    purity = log sum_v p_v ** 2 = logsumexp_v 2 z_v - 2 logsumexp_v z_v

Products are accumulated in float32, over tiles of positions too, whatever the weights are in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .gpu_tiles import compiled, log_purity, log_sum_exp

HEAD_VERSION = "fused-2 float32"
# On a CPU a tile and its softmax should stay in the cache; a GPU wants larger products.
TILE_ROWS = {"cpu": 1024, "cuda": 4096}
TILE_VOCABULARY = {"cpu": 512, "cuda": 16_384}  # 64M elements at most


@dataclass(frozen=True)
class HeadSpec:
    """The scale and soft cap of a logit after the projection."""

    scale: float = 1.0
    softcap: float = 0.0  # 0: none


@dataclass(frozen=True)
class OutputHead:
    """The weights of the projection to the vocabulary, or to a part of it."""

    weight: Tensor  # (vocabulary, hidden)
    bias: Tensor | None  # (vocabulary,)
    spec: HeadSpec

    def columns(self, part: slice) -> OutputHead:
        """The projection to a part of the vocabulary."""
        bias = None if self.bias is None else self.bias[part]
        return OutputHead(self.weight[part], bias, self.spec)


def output_head(model: Any) -> OutputHead | None:
    """The head of a causal model; None if it is more than a plain projection."""
    layer = model.get_output_embeddings()
    # An adapter on the head is a wrapper whose `weight` lacks the adapter.
    if not isinstance(layer, nn.Linear) or layer.weight.is_meta:
        return None
    if hasattr(layer.weight, "to_local"):  # a DTensor: each rank has a part of the vocabulary
        return None
    return OutputHead(layer.weight, layer.bias, head_spec(model.config))


def head_spec(config: Any) -> HeadSpec:
    """Scale and softcap of a config, as Cohere, Granite and Gemma 2 spell them."""
    config = config.get_text_config(decoder=True)
    divisor = _number(config, "logits_scaling", 1.0)
    scale = _number(config, "logit_scale", 1.0) / divisor
    return HeadSpec(scale=scale, softcap=_number(config, "final_logit_softcapping", 0.0))


def _number(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else default


def scored_rows(head: OutputHead, hidden: Tensor, targets: Tensor, *, purity: bool) -> Tensor:
    """Log p of `targets` (T,) given `hidden` (T, hidden), without a gradient: (1, T) float32.

    With `purity` a second row is log sum_v p_v ** 2.
    """
    return score_targets(hidden, head, targets, KeptLogits(), purity=purity)[0]


def score_targets(
    hidden: Tensor, head: OutputHead, targets: Tensor, kept: KeptLogits, *, purity: bool = False
) -> tuple[Tensor, Tensor]:
    """`scored_rows`, and the log-sum-exp of each position's logits: (T,) float32.

    The latter turns any other logit into a probability.
    """
    count = len(targets)
    scored = torch.empty((2 if purity else 1, count), dtype=torch.float32, device=hidden.device)
    sums = torch.empty_like(scored[0])
    rows = tile_rows(hidden.device, count)
    tiles = Tiles.like(hidden, min(rows, count), kept)
    for start in range(0, count, rows):
        states, tile = hidden[start : start + rows], slice(start, start + rows)
        logs, purities = _sums(states, start, head, tiles, purity=purity)
        sums[tile] = logsumexp = torch.logsumexp(logs, dim=0)
        scored[0, tile] = _target_logits(states, head, targets[tile]) - logsumexp
        if purity:
            # Each tile's fraction of the whole is at most 1, so nothing overflows.
            fractions = 2 * (logs - logsumexp) + purities
            scored[1, tile] = torch.logsumexp(fractions, dim=0)
    return scored, sums


def tile_rows(device: torch.device, count: int) -> int:
    """Positions per tile for `count` positions; on a GPU all tiles are about equally large."""
    most = TILE_ROWS.get(device.type, 2048)
    if device.type != "cuda":
        return most
    return min(most, 128 * math.ceil(count / math.ceil(max(1, count) / most) / 128) or most)


def operand(states: Tensor) -> Tensor:
    """The states in the dtype of products: CPUs need float32, GPUs accumulate in it."""
    return states if states.is_cuda else states.float()


def _sums(
    states: Tensor, first: int, head: OutputHead, tiles: Tiles, *, purity: bool
) -> tuple[Tensor, Tensor]:
    """The reductions of each tile of the vocabulary: (tiles, rows) float32, two times.

    Its log-sum-exp; and log sum p ** 2 as if there were no other tile, where purity is wanted.
    """
    logs: list[Tensor] = []
    purities: list[Tensor] = []
    states = operand(states)
    for start in range(0, len(head.weight), tiles.width):
        tile = head.columns(slice(start, start + tiles.width))
        logits = tiles.logits_of(states, tile, (first, start))
        if logits.is_cuda:
            logs.append(compiled(log_sum_exp)(logits))
            if purity:
                purities.append(compiled(log_purity)(logits))
            del logits  # before the next tile takes as much again
            continue
        softmax = tiles.softmax_like(logits)
        # Faster than logsumexp over a tile in cache. Any z_v - log_softmax(z)_v is the log-sum-exp;
        # the largest logit gives the most exact one.
        torch.log_softmax(logits, dim=1, out=softmax)
        logs.append(logits.amax(dim=1) - softmax.amax(dim=1))
        if purity:
            purities.append(softmax.mul_(2).exp_().sum(dim=1).log_())
    stacked = torch.stack(logs)
    return stacked, torch.stack(purities) if purity else stacked[:0]


def _target_logits(states: Tensor, head: OutputHead, targets: Tensor) -> Tensor:
    logits = torch.linalg.vecdot(states.float(), head.weight[targets].float())
    if head.bias is not None:
        logits = logits + head.bias[targets]
    return _shaped(logits, head.spec)


def _shaped(logits: Tensor, spec: HeadSpec) -> Tensor:
    """The logits, scaled and capped in their own memory."""
    if spec.scale != 1.0:
        logits *= spec.scale
    if spec.softcap:
        logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return logits


def _products(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32, of operands in half precision too."""
    if left.dtype == torch.float32:
        return left @ right.float()
    return torch.mm(left, right, out_dtype=torch.float32)


TileOrigin = tuple[int, int]  # the first position and the first token of a tile


@dataclass(frozen=True)
class Tiles:
    """Two buffers that every tile of a call reuses, and the tiles that are kept instead."""

    logits: Tensor  # (rows * vocabulary,) float32
    softmax: Tensor  # (rows * vocabulary,) float32
    width: int
    kept: KeptLogits

    @staticmethod
    def like(hidden: Tensor, rows: int, kept: KeptLogits) -> Tiles:
        """Buffers for tiles of `rows` positions; on a GPU new memory costs nothing."""
        width = TILE_VOCABULARY.get(hidden.device.type, 2048)
        size = 0 if hidden.is_cuda else rows * width
        buffers = torch.empty(2, size, dtype=torch.float32, device=hidden.device)
        return Tiles(buffers[0], buffers[1], width, kept)

    def logits_of(self, states: Tensor, head: OutputHead, origin: TileOrigin) -> Tensor:
        """The model's own logits of the tile that begins at `origin`: (rows, columns) float32.

        They may be kept, so they are not to be changed.
        """
        if origin in self.kept.tiles:
            return self.kept.tiles[origin]
        shape = (len(states), len(head.weight))
        space = self.kept.space(origin, shape)
        if states.is_cuda:
            products = _products(states, head.weight.t())
            logits = products if space is None else space.copy_(products)
        else:
            logits = self.scratch(shape) if space is None else space
            torch.mm(states, head.weight.float().t(), out=logits)
        if head.bias is not None:
            logits += head.bias
        return _shaped(logits, head.spec)

    def scratch(self, shape: Sequence[int]) -> Tensor:
        """The first buffer, in the shape of a tile."""
        return self.logits[: math.prod(shape)].view(*shape)

    def softmax_like(self, logits: Tensor) -> Tensor:
        """The second buffer, in the shape of a tile."""
        return self.softmax[: logits.numel()].view(logits.shape)


class KeptLogits:
    """The tiles of one call that fit into a buffer, the first ones first."""

    def __init__(self, free: Tensor | None = None) -> None:
        self.tiles: dict[TileOrigin, Tensor] = {}
        self.is_needed = True
        self._free = torch.empty(0) if free is None else free

    def release(self) -> None:
        """Lets the next call reuse the buffer."""
        self.is_needed = False

    def invalidate(self) -> None:
        """Forgets the tiles: the buffer is another call's, and a backward pass projects again."""
        self.tiles.clear()
        self._free = self._free[:0]

    def space(self, origin: TileOrigin, shape: tuple[int, int]) -> Tensor | None:
        """The memory in which a tile is kept; None if the buffer is full."""
        size = shape[0] * shape[1]
        if size > len(self._free):
            return None
        tile, self._free = self._free[:size].view(shape), self._free[size:]
        self.tiles[origin] = tile
        return tile
