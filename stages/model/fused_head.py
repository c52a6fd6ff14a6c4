"""The fused output head: log-probabilities from hidden states, without all logits at once.

    logp(y) = z_y - logsumexp_v z_v,   z = softcap * tanh(scale * (W h + b) / softcap)

Tiles of (positions, vocabulary) are projected, reduced to one float32 log-sum-exp per position, and
then overwritten, or kept for the backward pass while they fit into a fixed buffer. So peak memory
grows with neither. On request the log of the sum of squared probabilities is computed too:

    collision_logp = log sum_v p_v ** 2 = logsumexp_v 2 z_v - 2 logsumexp_v z_v

Products are accumulated in float32 for weights of any dtype, also over tiles of positions. The
gradient of a log-prob,

    d logp(y) / d z_v = [v = y] - p_v,   p_v = exp(z_v - logsumexp z)

is computed from the kept tiles; the others are projected again. Projection is a quarter of a head's
work, and none is repeated if a batch's tokens times the vocabulary is at most 16 million.

On a CPU, tiles stay in its cache. A GPU reads and writes a whole tile for each operation that is
not fused with the next, so there each reduction of a tile is compiled into one pass.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .library_errors import is_out_of_memory

logger = logging.getLogger("align")

HEAD_VERSION = "fused-2 float32"
# On a CPU a tile and its softmax should stay in the cache; a GPU wants larger products.
TILE_ROWS = {"cpu": 1024, "cuda": 4096}
TILE_VOCABULARY = {"cpu": 512, "cuda": 16_384}  # 64M elements at most
BUFFER_BYTES = 64 << 20  # of logits kept for the backward pass


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
    """The head of a causal model; None if it is not a plain projection."""
    layer = model.get_output_embeddings()
    # An adapter on the head is a wrapper whose `weight` lacks the adapter.
    if not isinstance(layer, nn.Linear) or layer.weight.is_meta:
        return None
    return OutputHead(layer.weight, layer.bias, head_spec(model.config))


def head_spec(config: Any) -> HeadSpec:
    """Scale and softcap from a config, under the names of Cohere, Granite and Gemma 2."""
    config = config.get_text_config(decoder=True)
    divisor = _number(config, "logits_scaling", 1.0)
    scale = _number(config, "logit_scale", 1.0) / divisor
    return HeadSpec(scale=scale, softcap=_number(config, "final_logit_softcapping", 0.0))


def _number(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else default


def fused_rows(
    head: OutputHead,
    hidden: Tensor,
    targets: Tensor,
    *,
    collision_logps: bool,
    buffer: LogitsBuffer | None = None,
) -> Tensor:
    """Log p of `targets` (T,) given `hidden` (T, hidden): (1, T) float32.

    With `collision_logps` a second row is log sum_v p_v ** 2. Only log p has a gradient, if
    gradients are enabled; `buffer` keeps logits for it.
    """
    if not torch.is_grad_enabled():
        kept = KeptLogits()
        return score_targets(hidden, head, targets, kept, collision_logps=collision_logps)[0]
    rows: Tensor = FusedLogps.apply(  # type: ignore[no-untyped-call]
        hidden, targets, collision_logps, buffer, head.weight, head.bias, head.spec
    )
    return rows


class LogpHead(nn.Linear):
    """An output embedding that returns `fused_rows` when it is called with targets.

    It must be called, because ZeRO-3 gathers a module's weight only around its call.
    """

    spec: HeadSpec
    buffer: LogitsBuffer

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, *, collision_logps: bool = False
    ) -> Tensor:
        """`fused_rows` of `targets` given `hidden` (T, hidden); without targets the logits."""
        if targets is None:
            return super().forward(hidden)
        head = OutputHead(self.weight, self.bias, self.spec)
        return fused_rows(
            head, hidden, targets, collision_logps=collision_logps, buffer=self.buffer
        )


def call_head_for_logps(model: Any) -> None:
    """Turns the model's head into a LogpHead; its parameter names and ties stay as they are."""
    layer = model.get_output_embeddings()
    layer.__class__ = LogpHead
    layer.spec = head_spec(model.config)
    layer.buffer = LogitsBuffer()


class FusedLogps(torch.autograd.Function):
    """Log-probs of targets, differentiable in hidden states, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        collision_logps: bool,
        buffer: LogitsBuffer | None,
        *head: Any,
    ) -> Tensor:
        """Computes the log-probs; keeps a log-sum-exp per position, and logits that fit."""
        # The parameters themselves instead of save_for_backward: ZeRO-3 empties them after each
        # use and fills the same objects again before their backward.
        ctx.head = OutputHead(*head)
        ctx.kept = KeptLogits() if buffer is None else buffer.acquire(hidden.device)
        rows, logsumexp = score_targets(
            hidden, ctx.head, targets, ctx.kept, collision_logps=collision_logps
        )
        ctx.save_for_backward(hidden, targets, logsumexp)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        """The needed gradients; a frozen head costs nothing."""
        hidden, targets, _ = ctx.saved_tensors
        head: OutputHead = ctx.head
        needs_hidden, _, _, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        new = torch.empty_like if len(targets) else torch.zeros_like  # tiles write all of it
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = new(head.weight) if needs_weight else None
        grad_bias = new(head.bias) if needs_bias and head.bias is not None else None
        # The negative gradient of each log-prob, times the logit's scale.
        slopes = -head.spec.scale * grad_rows[0]
        if len(targets):
            _write_gradients(ctx, slopes, grad_hidden, grad_weight, grad_bias)
        ctx.kept.release()
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(slopes[:, None]).to(hidden.dtype)
        return grad_hidden, None, None, None, grad_weight, grad_bias, None


def _write_gradients(
    ctx: Any,
    slopes: Tensor,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """Writes the needed gradients; that of hidden states is not yet times its slopes."""
    hidden, targets, logsumexp = ctx.saved_tensors
    head: OutputHead = ctx.head
    states = operand(hidden)
    # float16 could not hold states times the slopes of a scaled loss.
    unit = slopes.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    # (hidden, T), laid out for the fastest products.
    weighted = (states * (slopes / unit)[:, None]).to(states.dtype).t()
    if not states.is_cuda:  # on a GPU, rows of any number of tokens would not be aligned
        weighted = weighted.contiguous()
    rows = tile_rows(states.device, len(targets))
    tiles = Tiles(states, min(rows, len(targets)), ctx.kept)
    parts = [slice(start, start + rows) for start in range(0, len(targets), rows)]
    for start in range(0, len(head.weight), tiles.width):
        columns = slice(start, start + tiles.width)
        tile = head.columns(columns)
        tile = replace(tile, weight=operand(tile.weight))
        of_weight = torch.zeros_like(tile.weight.t(), dtype=torch.float32)
        of_bias = torch.zeros_like(tile.weight[:, 0], dtype=torch.float32)
        for part in parts:
            logits = tiles.logits_of(states[part], tile, (part.start, start))
            of_tile = logsumexp[part], targets[part] - start, head.spec.softcap
            if logits.is_cuda:
                of_logits = compiled(grad_logits)(logits, *of_tile, states.dtype)
            else:
                of_logits = _grad_logits_in_cache(logits, *of_tile, tiles)
            if grad_hidden is not None:
                _add_product(grad_hidden[part], of_logits, tile.weight)
            if grad_weight is not None:
                _add_product(of_weight, weighted[:, part], of_logits)
            if grad_bias is not None:
                of_bias.addmv_(of_logits.float().t(), slopes[part])
            del logits, of_logits  # frees GPU memory before the next tile
        if grad_weight is not None:
            grad_weight[columns] = of_weight.mul_(unit).t()
        if grad_bias is not None:
            grad_bias[columns] = of_bias


def score_targets(
    hidden: Tensor, head: OutputHead, targets: Tensor, kept: KeptLogits, *, collision_logps: bool
) -> tuple[Tensor, Tensor]:
    """`fused_rows` without a gradient, and each position's log-sum-exp of logits, (T,) float32."""
    count = len(targets)
    scored = torch.empty(
        (2 if collision_logps else 1, count), dtype=torch.float32, device=hidden.device
    )
    sums = torch.empty_like(scored[0])
    rows = tile_rows(hidden.device, count)
    tiles = Tiles(hidden, min(rows, count), kept)
    for start in range(0, count, rows):
        states, tile = hidden[start : start + rows], slice(start, start + rows)
        logs, collisions = _sums(states, start, head, tiles, collision_logps=collision_logps)
        sums[tile] = logsumexp = torch.logsumexp(logs, dim=0)
        scored[0, tile] = _target_logits(states, head, targets[tile]) - logsumexp
        if collision_logps:
            # Each tile's fraction of the total is at most 1, so nothing overflows.
            fractions = 2 * (logs - logsumexp) + collisions
            scored[1, tile] = torch.logsumexp(fractions, dim=0)
    return scored, sums


def tile_rows(device: torch.device, count: int) -> int:
    """Positions per tile for `count` positions; on a GPU all tiles have about equal size."""
    most = TILE_ROWS.get(device.type, 2048)
    if device.type != "cuda":
        return most
    return min(most, 128 * math.ceil(count / math.ceil(max(1, count) / most) / 128) or most)


def operand(states: Tensor) -> Tensor:
    """The hidden states in the dtype of products: float32 on a CPU; GPUs accumulate in float32."""
    return states if states.is_cuda else states.float()


def _sums(
    states: Tensor, first: int, head: OutputHead, tiles: Tiles, *, collision_logps: bool
) -> tuple[Tensor, Tensor]:
    """Two reductions of each tile of the vocabulary, (tiles, rows) float32 each.

    Its log-sum-exp; with `collision_logps` also log sum p ** 2 over this tile alone.
    """
    logs: list[Tensor] = []
    collisions: list[Tensor] = []
    states = operand(states)
    for start in range(0, len(head.weight), tiles.width):
        tile = head.columns(slice(start, start + tiles.width))
        logits = tiles.logits_of(states, tile, (first, start))
        if logits.is_cuda:
            logs.append(compiled(log_sum_exp)(logits))
            if collision_logps:
                collisions.append(compiled(log_collision)(logits))
            del logits  # frees memory before the next tile
            continue
        softmax = tiles.softmax_like(logits)
        # Faster than logsumexp over a tile in the cache. Every z_v - log_softmax(z)_v equals the
        # log-sum-exp; the largest logit gives the most exact value.
        torch.log_softmax(logits, dim=1, out=softmax)
        logs.append(logits.amax(dim=1) - softmax.amax(dim=1))
        if collision_logps:
            collisions.append(softmax.mul_(2).exp_().sum(dim=1).log_())
    stacked = torch.stack(logs)
    return stacked, torch.stack(collisions) if collision_logps else stacked[:0]


def _target_logits(states: Tensor, head: OutputHead, targets: Tensor) -> Tensor:
    logits = torch.linalg.vecdot(states.float(), head.weight[targets].float())
    if head.bias is not None:
        logits = logits + head.bias[targets]
    return _shaped(logits, head.spec)


def _shaped(logits: Tensor, spec: HeadSpec) -> Tensor:
    """The logits, scaled and capped in place."""
    if spec.scale != 1.0:
        logits *= spec.scale
    if spec.softcap:
        logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return logits


def _products(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32, also for operands in half precision."""
    if left.dtype == torch.float32:
        return left @ right.float()
    return torch.mm(left, right, out_dtype=torch.float32)


def _grad_logits_in_cache(
    logits: Tensor, logsumexp: Tensor, targets: Tensor, softcap: float, tiles: Tiles
) -> Tensor:
    """`grad_logits` in float32, in a buffer that stays in a CPU's cache: (rows, columns)."""
    probabilities = torch.sub(logits, logsumexp[:, None], out=tiles.softmax_like(logits))
    probabilities.exp_()
    inside = (targets >= 0) & (targets < logits.shape[1])
    columns = targets.clamp(0, logits.shape[1] - 1)[:, None]
    probabilities.scatter_add_(1, columns, -inside.float()[:, None])
    if softcap:
        tanh = torch.div(logits, softcap, out=tiles.scratch(logits.shape))
        probabilities.mul_(tanh.square_().neg_().add_(1))
    return probabilities


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == right.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        half = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
        total += torch.mm(left.to(half), right.to(half), out_dtype=torch.float32)


TileOrigin = tuple[int, int]  # the first position and the first token of a tile


class Tiles:
    """Two buffers that all tiles of a call reuse, and the kept tiles."""

    def __init__(self, hidden: Tensor, rows: int, kept: KeptLogits) -> None:
        """Buffers for tiles of `rows` positions; a GPU needs none, as new memory is cheap there."""
        self.width, self.kept = TILE_VOCABULARY.get(hidden.device.type, 2048), kept
        size = 0 if hidden.is_cuda else rows * self.width
        buffers = torch.empty(2, size, dtype=torch.float32, device=hidden.device)
        self.logits, self.softmax = buffers[0], buffers[1]

    def logits_of(self, states: Tensor, head: OutputHead, origin: TileOrigin) -> Tensor:
        """The model's own logits of the tile at `origin`, (rows, columns) float32.

        They may be kept, so they must not be changed.
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
    """The first tiles of one call, as many as fit into a buffer."""

    def __init__(self, free: Tensor | None = None) -> None:
        self.tiles: dict[TileOrigin, Tensor] = {}
        self.is_needed = True
        self._free = torch.empty(0) if free is None else free

    def release(self) -> None:
        """Lets the next call reuse the buffer."""
        self.is_needed = False

    def invalidate(self) -> None:
        """Drops the tiles when another call takes the buffer; the backward pass projects again."""
        self.tiles.clear()
        self._free = self._free[:0]

    def space(self, origin: TileOrigin, shape: tuple[int, int]) -> Tensor | None:
        """The memory for a tile; None if the buffer is full."""
        size = shape[0] * shape[1]
        if size > len(self._free):
            return None
        tile, self._free = self._free[:size].view(shape), self._free[size:]
        self.tiles[origin] = tile
        return tile


class LogitsBuffer:
    """The logits buffer of a head, used by one call at a time; other calls keep no tiles.

    It is not freed between calls: allocating it again would cost more than it saves.
    """

    def __init__(self, size: int = BUFFER_BYTES) -> None:
        self._size = size
        self._buffer: Tensor | None = None
        self._last: weakref.ref[KeptLogits] | None = None

    def __reduce__(self) -> tuple[type[LogitsBuffer], tuple[int]]:
        return LogitsBuffer, (self._size,)  # a copy of the head has a buffer of its own

    def acquire(self, device: torch.device) -> KeptLogits:
        """The buffer for one call, until it is released or no longer referenced."""
        last = self._last() if self._last is not None else None
        if last is not None:
            if last.is_needed:
                return KeptLogits()
            last.invalidate()
        if self._buffer is None or self._buffer.device != device:
            elements = self._size // torch.float32.itemsize
            self._buffer = torch.empty(elements, dtype=torch.float32, device=device)
        kept = KeptLogits(self._buffer)
        self._last = weakref.ref(kept)
        return kept


def log_sum_exp(logits: Tensor) -> Tensor:
    """Log of the sum of exponentials of each row: (rows,)."""
    return torch.logsumexp(logits, dim=1)


def log_collision(logits: Tensor) -> Tensor:
    """Log of sum p ** 2 of each row, with p over this tile alone: (rows,)."""
    return torch.logsumexp(2 * logits, dim=1) - 2 * torch.logsumexp(logits, dim=1)


def grad_logits(
    logits: Tensor, logsumexp: Tensor, targets: Tensor, softcap: float, dtype: torch.dtype
) -> Tensor:
    """p_v - [v = y], times the derivative of the softcap, in `dtype`: (rows, columns).

    `targets` (rows,) are relative to the tile's first token.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    found = (logits - logsumexp[:, None]).exp() - (columns[None, :] == targets[:, None]).float()
    if softcap:
        # d softcap * tanh(u / softcap) / du = 1 - tanh(u / softcap) ** 2
        found = found * (1 - (logits / softcap).square())
    return found.to(dtype)


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function compiled for tiles of any size; itself if it cannot be compiled."""
    made, can_compile = torch.compile(function, dynamic=True), True

    def run(*arguments: Any) -> Tensor:
        nonlocal can_compile
        if can_compile:
            try:
                result: Tensor = made(*arguments)
            except Exception as error:  # a missing compiler fails in many ways
                if is_out_of_memory(error):
                    raise
                can_compile, why = False, str(error).split("\n")[0]
                logger.warning("The output head is not compiled, which is slower: %s.", why)
            else:
                return result
        return function(*arguments)

    return run
