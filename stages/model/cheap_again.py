"""Drops activations that are cheap to compute, and computes them again in the backward pass.

Autograd keeps the input of every matrix product. If a cheap operation made that input (a norm's
scaling, an activation function and its gate, the joining of attention segments), the input is
dropped and the same operation is run again on the numbers that autograd keeps for it anyway, so
every gradient has the same bits. A Llama then keeps half as many bytes per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Kernels that keep their output: the CPU's, and its replacement in a memory plan.
ATTENTION = {"ScaledDotProductFlashAttentionForCpuBackward0", "KeptAttentionBackward"}


def drops_cheap(device: str, *, is_partitioned: bool) -> bool:
    """Whether a policy without gradient checkpointing drops cheap activations.

    Under ZeRO-3 the hooks would keep gathered weights; on a GPU the gain was not measured.
    """
    return device == "cpu" and not is_partitioned


@contextmanager
def cheap_computed_again(keep: Callable[[Tensor], Tensor] = lambda one: one) -> Iterator[None]:
    """Drops cheap activations in the block; `keep` gets each tensor that autograd keeps."""
    activations = _Activations(keep)
    with saved_tensors_hooks(activations.pack, activations.unpack), activations:
        try:
            yield
        finally:
            activations.forward_is_done()


class _Dropped:
    """A tensor that its node computes again; it is kept from its first use to its last."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.uses = 0  # by operations whose backward has not run
        self.again: Tensor | None = None


class _Activations(TorchFunctionMode):
    """Notes before every call which operation made its tensors; autograd's hooks do not tell.

    A tensor that was changed in place is kept, because its operation would compute the old values.
    A kept tensor must not change either; autograd checks that only without hooks.
    """

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._keep = keep
        self._nodes: dict[int, Any] = {}  # of the running call's arguments, by storage
        self._dropped: dict[Any, _Dropped] = {}  # by node
        self._depth = 0  # above 0 while a tensor is computed for another one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the call; autograd packs some of its arguments meanwhile."""
        for tensor in args:
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor._version:
                node = (tensor if tensor._base is None else tensor._base).grad_fn
                if node is not None and is_cheap(node):
                    self._nodes[tensor.untyped_storage()._cdata] = node
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._nodes.clear()

    def pack(self, tensor: Tensor) -> Any:
        """The tensor, or its dropped form with its shape."""
        node = self._nodes.get(tensor.untyped_storage()._cdata)
        if node is None:
            return self._keep(tensor), tensor._version
        dropped = self._dropped.setdefault(node, _Dropped(node))
        dropped.uses += 1
        return dropped, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """The tensor, computed again if it was dropped."""
        if isinstance(packed[0], Tensor):
            kept: Tensor = packed[0]
            if kept._version != packed[1]:
                raise RuntimeError(f"{tuple(kept.shape)} was modified by an inplace operation")
            return kept
        dropped, *shape = packed
        if dropped.again is None:
            self._depth += 1
            with torch.no_grad():
                dropped.again = CHEAP[dropped.node.name()](dropped.node)
            self._depth -= 1
        again: Tensor = dropped.again.as_strided(*shape)
        if not self._depth:  # a tensor computed for another one is unpacked once more
            dropped.uses -= 1
            if not dropped.uses:
                dropped.again = None
        return again

    def forward_is_done(self) -> None:
        """Releases the autograd nodes, whose hooks would keep each other alive."""
        self._dropped.clear()


def is_cheap(node: Any) -> bool:
    """Whether the operation of a node is cheap, and keeps all inputs of running it again."""
    name = node.name()
    inputs = node.next_functions
    if name == "MulBackward0":  # keeps a factor where the other one needs a gradient
        return all(maker is not None for maker, _ in inputs)
    if name == "CatBackward0":
        return all(_is_transposed_attention(maker) for maker, _ in inputs)
    return name in CHEAP


def _is_transposed_attention(node: Any) -> bool:
    is_transposed = node is not None and node.name() == "TransposeBackward0"
    return is_transposed and node.next_functions[0][0].name() in ATTENTION


def _joined_attention(node: Any) -> Tensor:
    """The joined attention outputs of a batch's segments, each kept by its own kernel."""
    outputs = []
    for maker, _ in node.next_functions:
        output = maker.next_functions[0][0]._saved_output
        outputs.append(output.transpose(_signed(maker._saved_dim0), _signed(maker._saved_dim1)))
    return torch.cat(outputs, _signed(node._saved_dim))


def _signed(dim: int) -> int:
    """A dimension with its sign, which nodes save as an unsigned number."""
    return dim - 2**64 if dim >= 2**63 else dim


CHEAP: dict[str, Callable[[Any], Tensor]] = {
    "MulBackward0": lambda node: node._saved_self * node._saved_other,
    "SiluBackward0": lambda node: functional.silu(node._saved_self),
    "GeluBackward0": lambda node: functional.gelu(
        node._saved_self, approximate=node._saved_approximate
    ),
    "CatBackward0": _joined_attention,
}
