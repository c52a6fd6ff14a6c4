"""Sharded loading: every rank reads and keeps only its own part of each parameter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ....schemas.batches import Partitions
from ....schemas.config import ModelOptions
from ..transformers_compat import TensorSource, compute_buffers, tensor_sources
from .load import DTYPES, from_folder, load_model, merged, nowhere, resolve, with_adapter
from .model_folder import (
    READ_BYTES,
    StoredTensor,
    cut_short,
    model_config,
    model_tensors,
    read_json,
    tensor_sha256,
)
from .quiet import quiet

logger = logging.getLogger("align")

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}
# Settings by which an adapter does more than add to the weights of layers.
TRAINED_WHOLE = ("modules_to_save", "trainable_token_indices", "target_parameters")


class _NotInPartsError(Exception):
    """A model that cannot be loaded part by part; the message says why."""


def load_sharded(
    options: ModelOptions,
    kind: Any = AutoModelForCausalLM,
    *,
    partitions: Partitions,
    reads: bool = True,
) -> nn.Module:
    """The model, its adapter merged into it, partitioned over the ranks as it is created.

    With `reads` false the parameters are NaN: a checkpoint is about to replace all of them.
    """

    def load() -> nn.Module:
        try:
            with quiet():
                return _spread(options, kind, partitions, reads=reads)
        except _NotInPartsError as reason:
            logger.warning(
                "%s is loaded whole on every rank, then spread: %s", options.path, reason
            )
            return load_model(options, kind)

    model = partitions.together(load)
    return _merged(model, options, partitions)


def _spread(options: ModelOptions, kind: Any, partitions: Partitions, *, reads: bool) -> nn.Module:
    _require_plain_weights(options)
    resolved = resolve(options)
    skeleton, _ = from_folder(nowhere(options), resolved, kind)
    stored = {tensor.name: tensor for tensor in model_tensors(Path(options.path))}
    sources = tensor_sources(skeleton, stored)
    _tie_equal(skeleton, sources, stored)
    compute_buffers(skeleton, partitions.device)
    loading = _Materializer(skeleton, partitions, stored, DTYPES[resolved.dtype], reads=reads)
    for source in sources:
        loading.materialize(source)
    loading.require_all()
    skeleton.__dict__.pop("hf_device_map", None)  # it is on no meta device any more
    model: nn.Module = skeleton
    return model


def _require_plain_weights(options: ModelOptions) -> None:
    if "quantization_config" in model_config(options.path):
        raise _NotInPartsError("its weights are quantized.")
    if not options.adapter:
        return
    settings = read_json(Path(options.adapter) / "adapter_config.json")
    if trained := [name for name in TRAINED_WHOLE if settings.get(name)]:
        raise _NotInPartsError(f"its adapter has {', '.join(trained)}.")


def _tie_equal(model: Any, sources: list[TensorSource], stored: Mapping[str, StoredTensor]) -> None:
    """Ties the weights that config.json wants tied, unless both are stored and differ."""
    found = {source.name: source for source in sources}
    for target, origin in list(model.all_tied_weights_keys.items()):
        if not {target, origin} <= found.keys():
            continue
        both = [stored[found[name].stored[0]] for name in (target, origin)]
        if found[target].convert or found[origin].convert or both[0].dtype != both[1].dtype:
            raise _NotInPartsError(
                f"{target} and {origin} are to be tied and are stored differently."
            )
        if tensor_sha256(both[0]) != tensor_sha256(both[1]):
            model.all_tied_weights_keys.pop(target)
    model.tie_weights(recompute_mapping=False)


@dataclass(frozen=True)
class _Holder:
    """A module that has a tensor, and its name there."""

    module: nn.Module
    name: str

    def set(self, tensor: Tensor) -> None:
        setattr(self.module, self.name, tensor)


class _Materializer:
    """Replaces the meta tensors of a model by loaded ones, one at a time."""

    def __init__(
        self,
        model: Any,
        partitions: Partitions,
        stored: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        *,
        reads: bool,
    ) -> None:
        self._model, self._partitions, self._stored = model, partitions, stored
        self._dtype, self._reads = dtype, reads
        self._holders = _holders(model)
        self._wanted: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        # peft copies a head for scores, which it cannot do with a part of one.
        self._base = f"{model.base_model_prefix}."
        self._spreads_all = model.get_output_embeddings() is not None

    def materialize(self, source: TensorSource) -> None:
        """Loads the tensors that are made of the stored tensors of a source."""
        if source.convert is None:
            self._put(source.name, partial(_read, self._stored[source.stored[0]]))
            return
        is_read = self._reads or not isinstance(self._wanted[source.name], nn.Parameter)
        made = source.convert(self._whole if is_read else self._shape)
        for name, value in made.items():
            self._put(name, partial(_copy_part, value.flatten()))

    def require_all(self) -> None:
        """Refuses a model with tensors that are still on the meta device."""
        if left := [name for name, tensor in self._model.state_dict().items() if tensor.is_meta]:
            raise _NotInPartsError(f"it draws {len(left)} tensors anew, first {left[0]}.")

    def _put(self, name: str, fill: Callable[[Tensor, int], None]) -> None:
        like = self._wanted[name]
        holders = self._holders.pop(id(like), [])  # none left: a tied one, and there already
        for holder in holders[:1]:
            made = self._made(name, like, fill)
            for each in (holder, *holders[1:]):
                each.set(made)

    def _made(self, name: str, like: Tensor, fill: Callable[[Tensor, int], None]) -> Tensor:
        if not isinstance(like, nn.Parameter):
            return self._whole_of(like, like.dtype, fill)
        if not like.is_floating_point():
            raise _NotInPartsError(f"{name} holds {like.dtype}.")
        fill = fill if self._reads else _fill_with_nan
        if self._spreads_all or name.startswith(self._base):
            return self._partitions.parameter(like, self._dtype, fill)
        return nn.Parameter(self._whole_of(like, self._dtype, fill))

    def _whole_of(
        self, like: Tensor, dtype: torch.dtype, fill: Callable[[Tensor, int], None]
    ) -> Tensor:
        whole = torch.empty(like.shape, dtype=dtype, device=self._partitions.device)
        fill(whole.view(-1), 0)
        return whole

    def _whole(self, stored: str) -> Tensor:
        tensor = self._stored[stored]
        whole = torch.empty(tensor.shape, dtype=_dtype_of(tensor))
        _read(tensor, whole.view(-1), 0)
        return whole.to(self._dtype) if whole.is_floating_point() else whole

    def _shape(self, stored: str) -> Tensor:
        tensor = self._stored[stored]
        return torch.empty(tensor.shape, dtype=_dtype_of(tensor), device="meta")


def _read(tensor: StoredTensor, into: Tensor, first: int) -> None:
    """Reads a stored tensor's elements from `first` on into a flat tensor, block by block."""
    dtype = _dtype_of(tensor)
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start + first * dtype.itemsize)
        for part in torch.split(into, READ_BYTES // dtype.itemsize):
            is_direct = part.dtype == dtype and part.device.type == "cpu"
            block = part if is_direct else torch.empty(len(part), dtype=dtype)
            memory: Any = block.view(torch.uint8).numpy()
            if stream.readinto(memory) < block.nbytes:
                raise cut_short(tensor.file)
            if not is_direct:
                part.copy_(block)


def _holders(model: nn.Module) -> dict[int, list[_Holder]]:
    """The modules that have a tensor of a model, by the tensor's identity."""
    holders: dict[int, list[_Holder]] = {}
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in chain(parameters, buffers):
            holders.setdefault(id(tensor), []).append(_Holder(module, name))
    return holders


def _dtype_of(tensor: StoredTensor) -> torch.dtype:
    if tensor.dtype not in STORED_DTYPES:
        raise _NotInPartsError(f"{tensor.name} is stored as {tensor.dtype}.")
    return STORED_DTYPES[tensor.dtype]


def _copy_part(whole: Tensor, part: Tensor, first: int) -> None:
    part.copy_(whole[first : first + len(part)])


def _fill_with_nan(part: Tensor, first: int) -> None:
    part.fill_(torch.nan)


def _merged(model: nn.Module, options: ModelOptions, partitions: Partitions) -> nn.Module:
    """The plain model, an adapter merged into one layer at a time."""
    if not options.adapter or hasattr(model, "merge_and_unload"):
        return merged(model)
    with quiet():
        adapted = partitions.together(lambda: with_adapter(model, options.adapter))
    for layer in adapted.modules():
        if hasattr(layer, "merge") and hasattr(layer, "get_base_layer"):
            layer.merge = partial(_merge_whole, layer.merge, layer, partitions)
    return merged(adapted)


def _merge_whole(merge: Any, layer: Any, partitions: Partitions, **how: Any) -> None:
    with partitions.changing(layer.get_base_layer().parameters()):
        merge(**how)
