"""The memory of a micro-batch: activations kept for the backward pass, and the head's.

A model without weights runs one forward pass on the meta device, where tensors have sizes but no
content, and autograd's hooks report the kept tensors. So no model family needs a formula. Attention
kernels differ between devices, so a function that keeps the same tensors replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ...schemas.errors import AlignError, UsageError
from ...schemas.rows import Tree
from .cheap_again import cheap_computed_again
from .fused_head import TILE_ROWS, TILE_VOCABULARY
from .library_errors import in_short
from .logprobs import ScoringPath, causal_model, last_states
from .mixer_rows import rows_for_mixers
from .transformers_compat import AttentionInterface, can_recompute, quiet, recompute_activations
from .tree_attention import TreeBatch

FLOAT = 4  # bytes
KERNEL = "align_kernel_on_meta"  # the attention of a model that is measured for a GPU
# 126 layers keep 5,000 tensors, and ten times as many with attention by completion. A model whose
# layers loop over positions would run for minutes.
MOST_TENSORS = 500_000


class UntracedError(UsageError):
    """The memory of a model is unknown: its layers fail without weights, or run too long."""


@dataclass(frozen=True)
class Kept:
    """Bytes that a micro-batch keeps from the forward to the backward pass."""

    tokens: int
    whole: int
    largest: int  # bytes of the largest kept tensor
    in_layer: int  # bytes of one layer that is recomputed in the backward pass; 0: none is


def kept(
    model: nn.Module, trees: Sequence[Tree], path: ScoringPath
) -> tuple[Kept, Kept, Kept | None]:
    """The kept bytes of one micro-batch: all, without cheap activations, and recomputed.

    The last keeps only the inputs of layers; None if the model cannot recompute. The model is on
    the meta device, and recomputes after this call.
    """
    inner = causal_model(model)
    with untraced():
        batch = path.batch(trees, torch.device("cpu"))
        on_meta: dict[str, Any] = {
            name: one.to("meta") for name, one in vars(batch).items() if isinstance(one, Tensor)
        }
        batch = replace(batch, **on_meta)
        tokens = batch.token_ids.numel()
        whole, largest = _forward(model, batch, path, drops=False)
        plain = Kept(tokens, whole, largest, 0)
        dropping = plain
        if path.layout == "packed":  # a CPU's layout; elsewhere nothing is dropped
            dropping = replace(plain, whole=_forward(model, batch, path, drops=True)[0])
        if not can_recompute(inner):
            return plain, dropping, None
        recompute_activations(inner)
        inputs, _ = _forward(model, batch, path, drops=False)
    layers = inner.config.get_text_config(decoder=True).num_hidden_layers
    return plain, dropping, Kept(tokens, inputs, largest, -(-(whole - inputs) // layers))


@contextmanager
def untraced() -> Iterator[None]:
    """Raises UntracedError for any error of layers on tensors without content."""
    try:
        yield
    except AlignError:
        raise
    except Exception as error:
        why = in_short(error)
        raise UntracedError(f"The memory of this model cannot be planned ({why}).") from error


def _forward(
    model: nn.Module, batch: TreeBatch, path: ScoringPath, *, drops: bool
) -> tuple[int, int]:
    """Bytes of all tensors that a forward pass keeps, except weights, and of the largest one."""
    inner = causal_model(model)
    weights = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    found: dict[int, Any] = {}  # storages by address, which stays unique while they exist

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            found[storage._cdata] = storage
        if len(found) > MOST_TENSORS:
            raise UntracedError(f"A micro-batch of this model keeps over {MOST_TENSORS:,} tensors.")
        return tensor

    model.train()
    hooks = cheap_computed_again(keep) if drops else saved_tensors_hooks(keep, lambda one: one)
    with _KeepingAttention(), hooks:
        if path.layout == "packed":
            states = last_states(inner, batch, path)
        else:  # a GPU's kernel reads no mask
            with quiet():  # as in logprobs.py
                inner.set_attn_implementation(KERNEL)
            inputs: dict[str, Any] = {"input_ids": batch.token_ids, "position_ids": batch.positions}
            inputs |= {"use_cache": False, **rows_for_mixers(inner, batch)}
            states = inner.base_model(**inputs).last_hidden_state.flatten(0, 1)
        keep(states[batch.predictors])  # like the head
    sizes = [storage.nbytes() for storage in found.values()]
    return sum(sizes), max(sizes)


class _KeepingAttention(TorchFunctionMode):
    """Replaces torch's attention by one that keeps the same tensors and computes nothing."""

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
        sums = query.new_empty((rows, heads, length), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; keys are not repeated over heads."""
    output: Tensor = KeptAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


AttentionInterface.register(KERNEL, _attend)


def head_bytes(weight: Tensor, positions: int, *, device: str) -> int:
    """The fused head's peak bytes in a backward pass, without its buffer of logits.

    `weight` is the head's, (vocabulary, hidden), and may be on the meta device.
    """
    (vocabulary, width), is_gpu = weight.shape, device == "cuda"
    operand = weight.itemsize if is_gpu else FLOAT  # a CPU multiplies in float32
    rows = min(TILE_ROWS.get(device, 2048), positions)
    columns = min(TILE_VOCABULARY.get(device, 2048), vocabulary)
    # The gradient of the hidden states, and the hidden states times a slope, as product operands.
    of_states = positions * width * (FLOAT + operand)
    tiles = rows * columns * (FLOAT + operand)  # logits, and their gradient
    of_tile = columns * width * FLOAT  # the gradient of its weights
    converted = 0
    if is_gpu:
        converted = max(rows, columns) * width * FLOAT  # a product before it is added
    elif weight.itemsize < FLOAT:
        converted = (positions + columns) * width * FLOAT
    of_weight = weight.nbytes if weight.requires_grad else 0
    return of_states + tiles + of_tile + converted + of_weight
