"""ZeRO-3 loading: transformers partitions each parameter over the ranks when it is created.

It then does not report unused or mismatched tensors, and ties heads that are stored with different
values. Both are checked before, on a model without weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers.integrations import deepspeed as hf_deepspeed

from ...schemas.config import ModelOptions
from .adapters import merged, with_adapter
from .load import from_folder, load_model, nowhere, resolve
from .model_folder import model_config, model_tensors, read_json, tensor_sha256
from .transformers_compat import is_reward_model, quiet, stored_names

logger = logging.getLogger("align")
_zero3: Any = hf_deepspeed  # it has no types

# Settings of adapters that do more than add to the weights of layers.
TRAINED_WHOLE = ("modules_to_save", "trainable_token_indices", "target_parameters")


def load_sharded(
    options: ModelOptions,
    kind: Any = None,
    *,
    config: Mapping[str, Any],
    together: Callable[[Callable[[], Any]], Any],
    later: str = "",
) -> nn.Module:
    """The model with its adapter merged; each rank has its shard of all parameters.

    `config` is DeepSpeed's. `together` runs an action on all ranks and raises one rank's error on
    all of them, so that no rank waits for one that failed. `later` is the folder of an adapter that
    is added to the model to be trained.
    """
    if reason := _why_whole(options.path, options.adapter or later):
        logger.warning("%s is loaded on every rank, then sharded: %s", options.path, reason)
        return merged(together(lambda: load_model(options, kind)))
    empty = together(lambda: _empty(options, kind))
    ties = together(lambda: _ties_heads(options, empty))
    with quiet(), _partitioning(config):
        untied = {} if ties else {"tie_word_embeddings": False}
        model, _ = from_folder(options, resolve(options), kind, untied)
    # The names to save under: here transformers keeps renamings that apply to no stored tensor.
    model._weight_conversions = empty._weight_conversions
    if is_reward_model(model) and isinstance(getattr(model, "score", None), nn.Linear):
        _unshard(model.score)
    if not options.adapter:
        loaded: nn.Module = model
        return loaded
    with quiet():
        adapted = together(lambda: with_adapter(model, options.adapter))
    for layer in adapted.modules():
        if hasattr(layer, "merge") and hasattr(layer, "get_base_layer"):
            layer.merge = partial(_merge_gathered, layer.merge, layer)
    return merged(adapted)


def _why_whole(model: str, adapter: str) -> str:
    """The reason for loading all of a model on each rank; "" if there is none."""
    if "quantization_config" in model_config(model):
        return "its weights are quantized."
    settings = read_json(Path(adapter) / "adapter_config.json") if adapter else {}
    trained = [name for name in TRAINED_WHOLE if settings.get(name)]
    return f"its adapter has {', '.join(trained)}." if trained else ""


def _empty(options: ModelOptions, kind: Any) -> Any:
    """The model without weights; refuses stored tensors that are missing, unused or misshapen."""
    with quiet():
        return from_folder(nowhere(options), resolve(options), kind)[0]


def _ties_heads(options: ModelOptions, empty: Any) -> bool:
    """Whether heads can be tied: no two of them are stored with different values."""
    stored = {tensor.name: tensor for tensor in model_tensors(Path(options.path))}
    names = stored_names(empty, stored)
    for pair in empty.all_tied_weights_keys.items():
        both = [[stored[one] for one in names.get(name, ())] for name in pair]
        contents = [[(one.dtype, tensor_sha256(one)) for one in each] for each in both]
        if all(both) and contents[0] != contents[1]:
            return False
    return True


@contextmanager
def _partitioning(config: Mapping[str, Any]) -> Iterator[None]:
    """Makes transformers partition the models that it loads in the block."""
    import deepspeed  # noqa: PLC0415 - slow to import, and nothing else here needs it

    deepspeed.init_distributed()  # its configuration asks for the number of ranks
    _held = _zero3.HfDeepSpeedConfig(dict(config))  # transformers keeps a weak reference
    try:
        yield
    finally:
        _zero3.unset_hf_deepspeed_config()


def _unshard(head: nn.Module) -> None:
    """Unshards a head on every rank, because peft copies it and cannot copy a shard."""
    with _gathered(head):
        whole = {name: one.detach().clone() for name, one in head.named_parameters()}
    for name, weight in whole.items():
        setattr(head, name, nn.Parameter(weight))


def _merge_gathered(merge: Any, layer: Any, **how: Any) -> None:
    with _gathered(layer.get_base_layer()):
        merge(**how)


def _gathered(module: nn.Module) -> Any:
    """Gathers a module's parameters in the block; rank zero's changes are kept."""
    import deepspeed  # noqa: PLC0415 - as above

    return deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0)
