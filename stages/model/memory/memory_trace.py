"""Peak memory of one micro-batch, traced on a model without weights.

The layers of transformers are run forward and backward on the meta device, where every tensor has
a size and no content. So autograd itself shows what it keeps, for any model and with gradient
checkpointing. Attention and the head, whose kernels differ between devices, are replaced by
functions that allocate and keep as much as those kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ....schemas.errors import AlignError, UsageError
from ....schemas.rows import Tree
from ..head.fused_head import TILE_ROWS, TILE_VOCABULARY
from ..head.fused_head_backward import BUFFER_BYTES
from ..layouts.tree_attention import PIECES, TreeBatch, tree_batch
from ..loading.library_errors import in_short
from ..logprobs import ScoringPath, causal_model, last_states
from ..transformers_compat import AttentionInterface
from .live_memory import LiveMemory

FLOAT = torch.float32
ANY_TREES = "align_any_trees"  # attention whose masks cost nothing
# Each takes up to a tenth of a millisecond. 126 layers, recomputed and with an adapter, take a
# fifth as many, and more where attention goes branch by branch, on a CPU. Layers that go over
# positions one by one would be traced for minutes.
MOST_OPERATIONS = 400_000


class UntracedError(UsageError):
    """The memory of a model is not known: its layers do not run without weights, or too long."""


@dataclass(frozen=True)
class Moment:
    """Peak memory of the backward pass while this many gradients were finished."""

    finished: int  # elements of parameters whose gradient was handed over
    layers: int  # bytes of activations and of gradients on their way
    head: int  # bytes that the head takes on top, while it runs


@dataclass(frozen=True)
class Trace:
    """Memory of one micro-batch, without the weights and the finished gradients."""

    moments: tuple[Moment, ...]  # of the layers' forward pass, then of the backward pass
    kept: int  # bytes that the layers keep from the forward to the backward pass
    masks: int  # bytes of dense attention masks, part of it
    buffer: int  # bytes of logits that the head keeps for good

    @property
    def head(self) -> int:
        """Peak bytes of the head while it runs."""
        return max(moment.head for moment in self.moments)

    def without_kept(self) -> Trace:
        """The same trace with the activations that layers keep offloaded to the CPU."""
        moments = [replace(one, layers=max(0, one.layers - self.kept)) for one in self.moments]
        return replace(self, moments=tuple(moments), kept=0)


@contextmanager
def refused_in_words() -> Iterator[None]:
    """Raises what a model's layers raise where they do not run without weights, in any way."""
    try:
        yield
    except AlignError:
        raise
    except Exception as error:
        why = in_short(error)
        raise UntracedError(f"The memory of this model cannot be planned ({why}).") from error


@refused_in_words()
def trace(model: nn.Module, trees: Sequence[Tree], path: ScoringPath, *, device: str) -> Trace:
    """The memory of one micro-batch on `device`, run on the meta device."""
    inner, moments = causal_model(model), list[Moment]()
    batch = _on_meta(tree_batch(trees, torch.device("cpu"), packed=path.layout != "tree"))
    live = LiveMemory("meta", MOST_OPERATIONS)
    for tensor in (*model.parameters(), *model.buffers(), *vars(batch).values()):
        if isinstance(tensor, Tensor):  # there before, and not counted
            live.know(tensor)
    model.train()
    finished, is_in_head = 0, path.head == "fused"

    def note() -> None:
        most = live.restart()
        layers = kept if is_in_head else most
        moments.append(Moment(finished, layers, most - layers))

    def hand_over(parameter: Tensor) -> None:
        nonlocal finished
        note()
        finished += parameter.numel()
        parameter.grad = None

    def leave_head(_: Tensor) -> None:
        nonlocal is_in_head
        note()
        is_in_head = False

    learning: list[Any] = [one for one in model.parameters() if one.requires_grad]
    hooks = [one.register_post_accumulate_grad_hook(hand_over) for one in learning]
    try:
        with _stand_ins(), live:
            states = _states(inner, batch, path)[batch.predictors]
            states.register_hook(leave_head)  # type: ignore[no-untyped-call]
            forward, kept = Moment(0, live.restart(), 0), live.now
            loss = _head_loss(inner, states, path, device)
            del states
            loss.backward()  # type: ignore[no-untyped-call]
            note()
    finally:
        for hook in hooks:
            hook.remove()
    masks = _mask_bytes(batch, inner, path)
    return Trace((forward, *moments), kept, masks, BUFFER_BYTES if path.head == "fused" else 0)


def _on_meta(batch: TreeBatch) -> TreeBatch:
    tensors: dict[str, Any] = {
        name: value.to("meta") for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return replace(batch, **tensors)


def _states(model: Any, batch: TreeBatch, path: ScoringPath) -> Tensor:
    """The last hidden states; layouts whose kernels need no mask run without one."""
    if path.layout in ("packed", "tree"):
        return last_states(model, batch, path)
    model.set_attn_implementation(ANY_TREES)
    hidden: Tensor = model.base_model(
        input_ids=batch.token_ids, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    return hidden.flatten(0, 1)


def _mask_bytes(batch: TreeBatch, model: Any, path: ScoringPath) -> int:
    if path.layout != "tree":
        return 0
    rows, length = batch.token_ids.shape
    return rows * length * length * int(model.dtype.itemsize)


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Replaces sdpa attention inside by a function that allocates but computes nothing."""
    make: Any = AttentionInterface
    known = make()
    before = {name: known[name] for name in (PIECES, "sdpa")}
    try:
        for name, attend in before.items():
            AttentionInterface.register(name, partial(_kept, attend))
        yield
    finally:
        for name, attend in before.items():
            AttentionInterface.register(name, attend)


def _kept(attend: Callable[..., Any], *args: Any, **options: Any) -> Any:
    # Here and not around all of the pass: a layer may run again within the backward pass.
    with _KeepingAttention():
        return attend(*args, **options)


class _KeepingAttention(TorchFunctionMode):
    """Keeps what kernels of flash attention keep for their backward pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return KeptAttention.apply(*args[:3])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class KeptAttention(torch.autograd.Function):
    """The memory of flash attention: queries, keys, values, outputs and a number per query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Outputs in the layout of the kernels: the heads of one token are contiguous."""
        rows, heads, length, _ = query.shape
        output = value.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty((rows, heads, length), dtype=FLOAT)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        """Gradients of queries, keys and values."""
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def attend_anywhere(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention in blocks: no mask, and no head's keys are repeated."""
    output: Tensor = KeptAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


AttentionInterface.register(ANY_TREES, attend_anywhere)


def _head_loss(model: Any, states: Tensor, path: ScoringPath, device: str) -> Tensor:
    if path.head != "fused":
        return states.sum()
    layer = model.get_output_embeddings()
    loss: Tensor = KeptHead.apply(states, layer.weight, device)  # type: ignore[no-untyped-call]
    return loss


class KeptHead(torch.autograd.Function):
    """The memory of the fused head, tile by tile."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, device: str) -> Tensor:
        """Keeps the states."""
        ctx.save_for_backward(states, weight)
        ctx.tile = _Tile.of(states, weight, device)
        ctx.tile.forward(states, weight)
        return states.new_empty((), dtype=FLOAT)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that are asked for."""
        states, weight = ctx.saved_tensors
        needs_states, needs_weight, _ = ctx.needs_input_grad
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_states = ctx.tile.backward(states, needs_states=needs_states)
        return grad_states, grad_weight, None


@dataclass(frozen=True)
class _Tile:
    """The sizes of a tile of logits."""

    rows: int
    columns: int
    is_gpu: bool

    @staticmethod
    def of(states: Tensor, weight: Tensor, device: str) -> _Tile:
        rows, columns = TILE_ROWS[device], TILE_VOCABULARY[device]
        return _Tile(min(rows, len(states)), min(columns, len(weight)), device == "cuda")

    def forward(self, states: Tensor, weight: Tensor) -> None:
        """Allocates logits in float32, then the weights of the targets.

        A CPU also has the softmax of a tile, and its operands in float32.
        """
        rows, columns = states[: self.rows], weight[: self.columns]
        area = self.rows * self.columns * (1 if self.is_gpu else 2)
        tiles = states.new_empty(area, dtype=FLOAT)
        sums = states.new_empty(self.rows * math.ceil(len(weight) / self.columns), dtype=FLOAT)
        if not self.is_gpu:
            _hold(rows.float(), columns.float())
        else:
            del tiles  # before the next product, and before the targets
        targets = weight.new_empty((len(rows), weight.shape[1]))
        _hold(sums, torch.linalg.vecdot(rows.float(), targets.float()))

    def backward(self, states: Tensor, *, needs_states: bool) -> Tensor | None:
        """The gradient of the states: a float32 sum, with the weighted states allocated too."""
        summed = states.new_empty(states.shape, dtype=FLOAT) if needs_states else None
        operand = states if self.is_gpu else states.float()
        weighted = (states * states.new_empty(1, dtype=FLOAT)).to(operand.dtype)
        if not self.is_gpu:
            weighted = weighted.t().contiguous()
        self._tiles(states, weighted)
        return None if summed is None else summed.to(states.dtype)

    def _tiles(self, states: Tensor, weighted: Tensor) -> None:
        width, area = states.shape[1], self.rows * self.columns
        sums = states.new_empty(self.columns * width, dtype=FLOAT)
        tiles = states.new_empty(area, dtype=FLOAT), states.new_empty(area, dtype=weighted.dtype)
        products = max(self.columns, self.rows) * width if self.is_gpu else 0
        _hold(sums, weighted, *tiles, states.new_empty(products, dtype=FLOAT))


def _hold(*_: Tensor) -> None:
    """Keeps its arguments alive together until the call."""
