"""LoRA layers whose products are added to the frozen layer's in place.

    y = x W' + b + s (x A') B'
    dy B = d,  dx = dy W + s d A,  dA = s d' x,  dB = s dy' (x A')

PEFT computes each sum and each scaling of y and dx as an operation of its own, which reads and
writes as much as the frozen layer's output. Here products do that, three forward and five backward.
What is kept for the backward pass is what PEFT's forward keeps: x and x A'.
https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.functional import linear

from .made_classes import with_forward

logger = logging.getLogger("align")
PROBE_ROWS = 5


def add_in_products(model: nn.Module) -> int:
    """Replaces the forward of the LoRA layers that fit; returns how many.

    Modules, parameters, and what PEFT saves, loads and merges stay as they are. Nothing is replaced
    if a probe of any kind of layer gives other numbers than PEFT's forward.
    """
    layers = list(_fitting(model))
    kinds = {_kind(layer): layer for layer in layers if not _is_empty(layer)}
    if not all(_apart(layer) <= 1.0 for layer in kinds.values()):
        logger.warning(
            "The adapter is added as PEFT does it, which is slower: adding it inside of products "
            "gives other numbers here."
        )
        return 0
    for layer in layers:
        kind: type = type(layer)
        layer.__class__ = _adding_in_products(kind)
    return len(layers)


@cache
def _adding_in_products(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of this class of PEFT; decoder layers that hold it can be compiled."""

    def forward(self: nn.Module, inputs: Tensor, *args: Any, **options: Any) -> Tensor:
        return _forward(kind, self, inputs, *args, **options)

    return with_forward(kind, forward, _adding_in_products)


def _fitting(model: nn.Module) -> Iterator[Any]:
    """LoRA layers that fit now, whose forward is PEFT's own."""
    from peft.tuners import lora  # noqa: PLC0415 - optional, and slow to import

    kinds = (lora.Linear, getattr(lora, "Linear4bit", lora.Linear))  # needs bitsandbytes
    modules: Iterable[Any] = model.modules()
    for layer in modules:
        if type(layer) not in kinds or "forward" in vars(layer) | vars(layer.base_layer):
            continue
        if _fits(layer):
            yield layer


def _fits(layer: Any) -> bool:
    """Whether one plain adapter is active, on frozen weights."""
    names, base = layer.active_adapters, layer.base_layer
    if len(names) != 1 or names[0] not in layer.lora_A:
        return False
    is_plain = names[0] not in layer.lora_variant and not layer.lora_bias[names[0]]
    return is_plain and not any(one.requires_grad for one in base.parameters(recurse=False))


def _forward(kind: Any, layer: Any, inputs: Tensor, *args: Any, **options: Any) -> Tensor:
    """The output; by the forward of PEFT's class where a layer does more than add the adapter."""
    if args or options or layer.merged or layer.disable_adapters or not _fits(layer):
        return kind.forward(layer, inputs, *args, **options)  # type: ignore[no-any-return]
    (name,), base = layer.active_adapters, layer.base_layer
    down, up, dropout = (one[name] for one in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    is_noisy = layer.training and not isinstance(dropout, nn.Identity) and dropout.p > 0
    # ZeRO-3 makes weights whole in hooks of the modules that hold them.
    is_hooked = any(one._forward_pre_hooks or one._forward_hooks for one in (base, down, up))
    is_cast = inputs.dtype != down.weight.dtype or _casts(inputs.device.type)
    if is_noisy or is_hooked or is_cast:
        return kind.forward(layer, inputs)  # type: ignore[no-any-return]
    adapter = (down.weight, up.weight, layer.scaling[name])
    if type(base) is nn.Linear and base.weight.dtype == inputs.dtype:
        output: Tensor = AdaptedLinear.apply(  # type: ignore[no-untyped-call]
            inputs, base.weight, base.bias, *adapter
        )
        return output
    frozen = base(inputs)
    if frozen.dtype != inputs.dtype:
        return kind.forward(layer, inputs)  # type: ignore[no-any-return]
    added: Tensor = AddedAdapter.apply(frozen, inputs, *adapter)  # type: ignore[no-untyped-call]
    return added


def _casts(device: str) -> bool:
    """Whether torch.autocast chooses the dtypes of products here; no meta device has it."""
    return device != "meta" and torch.is_autocast_enabled(device)


class AdaptedLinear(torch.autograd.Function):
    """A frozen linear layer with its adapter, differentiable in the input, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,  # (…, in)
        weight: Tensor,  # (out, in)
        bias: Tensor | None,  # (out,)
        *adapter: Any,  # A, (rank, in); B, (out, rank); the scale
    ) -> Tensor:  # (…, out)
        """The adapter's second product is added to the frozen layer's output in place."""
        down, up, scale = adapter
        rows = _rows(inputs)
        low = rows @ down.t()
        output = linear(rows, weight, bias).addmm_(low, up.t(), alpha=scale)
        ctx.save_for_backward(inputs, low, weight, down, up)
        ctx.scale = scale
        return _shaped(output, inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that are asked for."""
        inputs, low, weight, down, up = ctx.saved_tensors
        needs_inputs, _, _, *needs_adapter, _ = ctx.needs_input_grad
        rows = _rows(grad)
        grad_low = _scaled(rows, up, ctx.scale) if needs_inputs or needs_adapter[0] else None
        grads = _adapter_grads(rows, inputs, low, grad_low, ctx.scale, needs_adapter)
        if not needs_inputs:
            return None, None, None, *grads, None
        grad_inputs = (rows @ weight).addmm_(grad_low, down)
        return _shaped(grad_inputs, inputs), None, None, *grads, None


class AddedAdapter(torch.autograd.Function):
    """An adapter added to the output of a frozen layer of any kind, such as one in 4 bits."""

    @staticmethod
    def forward(
        ctx: Any,
        frozen: Tensor,  # (…, out)
        inputs: Tensor,  # (…, in)
        down: Tensor,  # A, (rank, in)
        up: Tensor,  # B, (out, rank)
        scale: float,
    ) -> Tensor:  # (…, out)
        """The sum is a new tensor: the frozen output may be a view, or be kept by its layer."""
        low = _rows(inputs) @ down.t()
        output = torch.addmm(_rows(frozen), low, up.t(), alpha=scale)
        ctx.save_for_backward(inputs, low, down, up)
        ctx.scale = scale
        return _shaped(output, frozen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that are asked for; the frozen output's is the output's own."""
        inputs, low, down, up = ctx.saved_tensors
        _, needs_inputs, *needs_adapter, _ = ctx.needs_input_grad
        rows = _rows(grad)
        grad_low = _scaled(rows, up, ctx.scale) if needs_inputs or needs_adapter[0] else None
        grads = _adapter_grads(rows, inputs, low, grad_low, ctx.scale, needs_adapter)
        grad_inputs = _shaped(grad_low @ down, inputs) if grad_low is not None else None
        return grad, grad_inputs if needs_inputs else None, *grads, None


def _adapter_grads(
    rows: Tensor,  # (rows, out), the output's gradient
    inputs: Tensor,
    low: Tensor,
    grad_low: Tensor | None,
    scale: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of A and B."""
    needs_down, needs_up = needs
    grad_down = grad_low.t() @ _rows(inputs) if needs_down and grad_low is not None else None
    return grad_down, _scaled(rows.t(), low, scale) if needs_up else None


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale * left @ right as one operation."""
    empty = left.new_empty(left.shape[0], right.shape[1])
    return empty.addmm_(left, right, beta=0, alpha=scale)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """The rows in the outer shape of `like`; no view, which callers could not change in place."""
    shaped: Tensor = torch.ops.aten._unsafe_view(rows, [*like.shape[:-1], rows.shape[-1]])
    return shaped


def _kind(layer: Any) -> tuple[Any, ...]:
    base, (down, up) = layer.base_layer, _adapter(layer)
    devices = (down.device, *(one.device for one in base.parameters(recurse=False)))
    return type(base), down.dtype, base.weight.dtype, down.shape, up.shape, devices


def _adapter(layer: Any) -> tuple[Tensor, Tensor]:
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def _is_empty(layer: Any) -> bool:
    """Whether the layer has no numbers to probe: it is on the meta device."""
    return any(one.is_meta for one in layer.parameters())


def _apart(layer: Any) -> float:
    """The distance of this forward, and of each gradient, from PEFT's: 1 is still rounding.

    B of a fresh adapter is zero, so A and B are drawn: PEFT's forward runs with the same ones.
    """
    with torch.enable_grad(), torch.inference_mode(False):
        ours = _numbers(layer, partial(_forward, type(layer)))
        theirs = _numbers(layer, type(layer).forward)
    eps = max(8 * torch.finfo(ours[0].dtype).eps, 1e-5)
    distances = [
        (one - other).double().norm() / other.double().norm() / eps
        for one, other in zip(ours, theirs, strict=True)
    ]
    return float(torch.stack(distances).max())


def _numbers(layer: Any, forward: Callable[..., Tensor]) -> list[Tensor]:
    """The output and the gradients of input, A and B, of a drawn input and adapter."""
    adapter, random = _adapter(layer), torch.Generator().manual_seed(0)
    drawn = [torch.randn(*one.shape, generator=random) for one in adapter]
    drawn.append(torch.randn(PROBE_ROWS, adapter[0].shape[1], generator=random))
    shares = [one.to(adapter[0]).requires_grad_() for one in drawn]
    (name,) = layer.active_adapters
    names = [f"lora_{part}.{name}.weight" for part in ("A", "B")]
    probed = _Probed(layer, forward)
    output = functional_call(
        probed,
        {f"layer.{one}": share for one, share in zip(names, shares[:2], strict=True)},
        (shares[2],),
    )
    slope = torch.randn(*output.shape, generator=random).to(output)
    return [output.detach(), *torch.autograd.grad(output, shares, slope)]


class _Probed(nn.Module):
    """A layer run by one of its forwards."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self._forward_of = layer, forward

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's output."""
        return self._forward_of(self.layer, inputs)
