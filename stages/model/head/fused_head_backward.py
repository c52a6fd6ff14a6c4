"""The differentiable fused head, which replaces the output head of a model that is trained.

    d logp(y) / d z_v = [v = y] - p_v,   p_v = exp(z_v - logsumexp z)

is computed from tiles that were kept or are projected a second time. To project them again is a
quarter of a head's work, all of which is saved where tokens of a batch times vocabulary is at most
16 million. Tiles that do not fit are projected again, so that memory grows with neither.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .fused_head import (
    HeadSpec,
    KeptLogits,
    OutputHead,
    Tiles,
    head_spec,
    operand,
    score_targets,
    scored_rows,
    tile_rows,
)
from .gpu_tiles import compiled, deviations

BUFFER_BYTES = 64 << 20


def fused_rows(
    head: OutputHead,
    hidden: Tensor,
    targets: Tensor,
    *,
    purity: bool,
    buffer: LogitsBuffer | None = None,
) -> Tensor:
    """`scored_rows` with a gradient of log p where gradients are enabled: (1 or 2, T) float32."""
    if not torch.is_grad_enabled():
        return scored_rows(head, hidden, targets, purity=purity)
    rows: Tensor = FusedLogps.apply(  # type: ignore[no-untyped-call]
        hidden, targets, purity, buffer, head.weight, head.bias, head.spec
    )
    return rows


class LogpHead(nn.Linear):
    """An output embedding that returns `fused_rows` when it is called with targets.

    It has to be called: ZeRO-3 gathers a module's weight around its call and nowhere else.
    """

    spec: HeadSpec
    buffer: LogitsBuffer

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, *, purity: bool = False
    ) -> Tensor:
        """`fused_rows` of `targets` given `hidden` (T, hidden); without targets the logits."""
        if targets is None:
            return super().forward(hidden)
        head = OutputHead(self.weight, self.bias, self.spec)
        return fused_rows(head, hidden, targets, purity=purity, buffer=self.buffer)


def call_head_for_logps(model: Any) -> None:
    """Turns the model's head into a LogpHead; its parameter names and ties stay as they are."""
    layer = model.get_output_embeddings()
    layer.__class__ = LogpHead
    layer.spec = head_spec(model.config)
    layer.buffer = LogitsBuffer()


class FusedLogps(torch.autograd.Function):
    """Log-probs of targets, differentiable in hidden states, weight and bias.

    The optional second row, purity, has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        purity: bool,
        buffer: LogitsBuffer | None,
        *head: Any,
    ) -> Tensor:
        """Scores as without gradients; keeps a number per position, and logits that fit."""
        # The parameters themselves, not save_for_backward: ZeRO-3 empties them after each use
        # and fills the same objects again before their backward.
        ctx.head = OutputHead(*head)
        ctx.kept = KeptLogits() if buffer is None else buffer.acquire(hidden.device)
        rows, logsumexp = score_targets(hidden, ctx.head, targets, ctx.kept, purity=purity)
        ctx.save_for_backward(hidden, targets, logsumexp)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that are asked for; a frozen head adds no work."""
        hidden, targets, logsumexp = ctx.saved_tensors
        head: OutputHead = ctx.head
        needs_hidden, _, _, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        new = torch.empty_like if len(targets) else torch.zeros_like  # tiles write all of it
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = new(head.weight) if needs_weight else None
        grad_bias = new(head.bias) if needs_bias and head.bias is not None else None
        if len(targets):
            # Minus the loss's slope in each log-prob, times the logit's scale.
            slopes = -head.spec.scale * grad_rows[0]
            grads = grad_hidden, grad_weight, grad_bias
            _write_gradients(grads, hidden, targets, logsumexp, slopes, ctx)
        ctx.kept.release()
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, None, None, None, grad_weight, grad_bias, None


def _write_gradients(
    grads: tuple[Tensor | None, ...],
    hidden: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    slopes: Tensor,
    ctx: Any,
) -> None:
    """Writes the gradients of hidden states (float32), weight and bias that are asked for."""
    grad_hidden, grad_weight, grad_bias = grads
    head: OutputHead = ctx.head
    softcap, states = head.spec.softcap, operand(hidden)
    # float16 could not hold states times the slopes of a scaled loss.
    unit = slopes.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    # (hidden, T), laid out for the fastest products.
    weighted = (states * (slopes / unit)[:, None]).to(states.dtype).t()
    if not states.is_cuda:  # there rows of any number of tokens would not be aligned
        weighted = weighted.contiguous()
    rows = tile_rows(states.device, len(targets))
    tiles = Tiles.like(states, min(rows, len(targets)), ctx.kept)
    parts = [slice(start, start + rows) for start in range(0, len(targets), rows)]
    for start in range(0, len(head.weight), tiles.width):
        columns = slice(start, start + tiles.width)
        tile = head.columns(columns)
        tile = replace(tile, weight=operand(tile.weight))
        of_weight = torch.zeros_like(tile.weight.t(), dtype=torch.float32)
        of_bias = torch.zeros_like(tile.weight[:, 0], dtype=torch.float32)
        for part in parts:
            logits = tiles.logits_of(states[part], tile, (part.start, start))
            columns_of_targets = targets[part] - start
            deviation = _deviation(
                logits, logsumexp[part], columns_of_targets, softcap, states.dtype, tiles
            )
            if grad_hidden is not None:
                _add_product(grad_hidden[part], deviation, tile.weight)
            if grad_weight is not None:
                _add_product(of_weight, weighted[:, part], deviation)
            if grad_bias is not None:
                of_bias.addmv_(deviation.float().t(), slopes[part])
            del logits, deviation  # on a GPU: before the next tile takes as much again
        if grad_weight is not None:
            grad_weight[columns] = of_weight.mul_(unit).t()
        if grad_bias is not None:
            grad_bias[columns] = of_bias
    if grad_hidden is not None:
        grad_hidden.mul_(slopes[:, None])


def _deviation(
    logits: Tensor,
    logsumexp: Tensor,
    targets: Tensor,
    softcap: float,
    dtype: torch.dtype,
    tiles: Tiles,
) -> Tensor:
    """`deviations`, on a CPU in float32 in a buffer that stays in its cache: (rows, columns)."""
    if logits.is_cuda:
        return compiled(deviations)(logits, logsumexp, targets, softcap, dtype)
    probabilities = torch.sub(logits, logsumexp[:, None], out=tiles.softmax_like(logits))
    probabilities.exp_()
    inside = (targets >= 0) & (targets < logits.shape[1])
    columns = targets.clamp(0, logits.shape[1] - 1)[:, None]
    probabilities.scatter_add_(1, columns, -inside.float()[:, None])
    if softcap:
        # d softcap * tanh(u / softcap) / du = 1 - tanh(u / softcap) ** 2
        tanh = torch.div(logits, softcap, out=tiles.scratch(logits.shape))
        probabilities.mul_(tanh.square_().neg_().add_(1))
    return probabilities


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == right.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        half = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
        total += torch.mm(left.to(half), right.to(half), out_dtype=torch.float32)


class LogitsBuffer:
    """The logits buffer of a head, used by one call at a time; other calls keep nothing.

    It outlives the calls: allocating it again would cost more than it saves.
    """

    def __init__(self, size: int = BUFFER_BYTES) -> None:
        self._size = size
        self._buffer: Tensor | None = None
        self._last: weakref.ref[KeptLogits] | None = None

    def __reduce__(self) -> tuple[type[LogitsBuffer], tuple[int]]:
        return LogitsBuffer, (self._size,)  # a copy of the head has a buffer of its own

    def acquire(self, device: torch.device) -> KeptLogits:
        """The buffer for the tiles of a call, until it is released or no longer referenced."""
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
