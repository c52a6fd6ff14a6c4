"""The differentiable fused head, which replaces the output head of a model that is trained.

    d logp(y) / d z_v = [v = y] - p_v,   p_v = exp(z_v - logsumexp z)

is computed from tiles that were kept or are projected a second time. To project them again is a
quarter of a head's work, all of which is saved where tokens of a batch times vocabulary is at most
16 million. Tiles that do not fit are projected again, so that memory grows with neither.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
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
        scored = score_targets(hidden, ctx.head, targets, ctx.kept, purity=purity)
        ctx.save_for_backward(hidden, targets, scored.logsumexp)
        return scored.rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that are asked for; a frozen head adds no work."""
        hidden, targets, logsumexp = ctx.saved_tensors
        head: OutputHead = ctx.head
        needs_hidden, _, _, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        new = torch.empty_like if len(targets) else torch.zeros_like  # tiles write all of it
        gradients = _Gradients(
            torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None,
            new(head.weight) if needs_weight else None,
            new(head.bias) if needs_bias and head.bias is not None else None,
        )
        if len(targets):
            slopes = -head.spec.scale * grad_rows[0]
            positions = _Positions.of(hidden, targets, logsumexp, slopes)
            _add_all(gradients, positions, head, ctx.kept)
        ctx.kept.release()
        grad_hidden = None if gradients.hidden is None else gradients.hidden.to(hidden.dtype)
        return grad_hidden, None, None, None, gradients.weight, gradients.bias, None


@dataclass(frozen=True)
class _Gradients:
    """The gradients that are asked for; the others are None."""

    hidden: Tensor | None  # (T, hidden) float32
    weight: Tensor | None  # (vocabulary, hidden) in its dtype
    bias: Tensor | None  # (vocabulary,) in its dtype


@dataclass(frozen=True)
class _Positions:
    """The inputs of every tile, by position."""

    states: Tensor  # (T, hidden) as products want them
    weighted: Tensor  # (hidden, T): slope / unit * state, laid out for the fastest products
    slopes: Tensor  # (T,) float32: minus the loss's slope in the log-prob, times the logit's scale
    unit: Tensor  # () float32
    targets: Tensor  # (T,)
    logsumexp: Tensor  # (T,) float32

    @staticmethod
    def of(hidden: Tensor, targets: Tensor, logsumexp: Tensor, slopes: Tensor) -> _Positions:
        states = operand(hidden)
        # float16 could not hold states times the slopes of a scaled loss.
        unit = slopes.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
        weighted = (states * (slopes / unit)[:, None]).to(states.dtype).t()
        if not states.is_cuda:  # there rows of any number of tokens would not be aligned
            weighted = weighted.contiguous()
        return _Positions(states, weighted, slopes, unit, targets, logsumexp)

    def __getitem__(self, rows: slice) -> _Positions:
        return _Positions(
            states=self.states[rows],
            weighted=self.weighted[:, rows],
            slopes=self.slopes[rows],
            unit=self.unit,
            targets=self.targets[rows],
            logsumexp=self.logsumexp[rows],
        )


def _add_all(
    gradients: _Gradients, positions: _Positions, head: OutputHead, kept: KeptLogits
) -> None:
    count = len(positions.targets)
    rows = tile_rows(positions.states.device, count)
    tiles = Tiles.like(positions.states, min(rows, count), kept)
    parts = [slice(start, start + rows) for start in range(0, count, rows)]
    for start in range(0, len(head.weight), tiles.width):
        columns = slice(start, start + tiles.width)
        tile = head.columns(columns)
        tile = replace(tile, weight=operand(tile.weight))
        grad_weight = torch.zeros_like(tile.weight.t(), dtype=torch.float32)
        grad_bias = torch.zeros_like(tile.weight[:, 0], dtype=torch.float32)
        for part in parts:
            logits = tiles.logits_of(positions.states[part], tile, (part.start, start))
            deviation = _deviation(positions[part], logits, tile.spec, start, tiles)
            if gradients.hidden is not None:
                _add_product(gradients.hidden[part], deviation, tile.weight)
            if gradients.weight is not None:
                _add_product(grad_weight, positions.weighted[:, part], deviation)
            if gradients.bias is not None:
                grad_bias.addmv_(deviation.float().t(), positions.slopes[part])
            del logits, deviation  # on a GPU: before the next tile takes as much again
        if gradients.weight is not None:
            gradients.weight[columns] = grad_weight.mul_(positions.unit).t()
        if gradients.bias is not None:
            gradients.bias[columns] = grad_bias
    if gradients.hidden is not None:
        gradients.hidden.mul_(positions.slopes[:, None])


def _deviation(
    positions: _Positions, logits: Tensor, spec: HeadSpec, first: int, tiles: Tiles
) -> Tensor:
    """p_v - [v = y], times the slope of the softcap, v counting from `first`: (rows, columns)."""
    columns = positions.targets - first
    if logits.is_cuda:
        dtype = positions.states.dtype
        return compiled(deviations)(logits, positions.logsumexp, columns, spec.softcap, dtype)
    probabilities = torch.sub(logits, positions.logsumexp[:, None], out=tiles.softmax_like(logits))
    probabilities.exp_()
    inside = (columns >= 0) & (columns < logits.shape[1])
    columns = columns.clamp(0, logits.shape[1] - 1)[:, None]
    probabilities.scatter_add_(1, columns, -inside.float()[:, None])
    if spec.softcap:
        # d softcap * tanh(u / softcap) / du = 1 - tanh(u / softcap) ** 2
        tanh = torch.div(logits, spec.softcap, out=tiles.scratch(logits.shape))
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
