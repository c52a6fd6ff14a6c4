"""Private names of transformers that are used, and differences between its versions.

Its modelling code has losses for object detection that load scipy wherever it is installed, which
costs any other model 36 MiB. They are imported here as if scipy were not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from transformers import utils
from transformers.modeling_layers import GradientCheckpointingLayer

from ...schemas.errors import UsageError

_utils: Any = utils
_is_scipy_available = _utils.is_scipy_available
_utils.is_scipy_available = lambda: False
try:
    from transformers import conversion_mapping, core_model_loading, modeling_utils
    from transformers.models.auto import auto_factory, modeling_auto
finally:
    _utils.is_scipy_available = _is_scipy_available

AttentionInterface: Any = modeling_utils.AttentionInterface


def attention_of(model: Any) -> str:
    """The name of a model's attention implementation."""
    name: str | None = model.config._attn_implementation
    return name or "eager"


def supports_sdpa(config: Any) -> bool:
    """Whether the causal model of a config has sdpa; any error if there is no such model."""
    mapping: Any = modeling_auto.AutoModelForCausalLM._model_mapping
    get: Any = auto_factory._get_model_class
    supported: bool = get(config, mapping)._supports_sdpa
    return supported


def can_recompute(model: Any) -> bool:
    """Whether the class of the model supports gradient checkpointing, and some module has it."""
    is_supported: bool = model.supports_gradient_checkpointing
    return is_supported and any(hasattr(one, "gradient_checkpointing") for one in model.modules())


def recompute_activations(
    model: Any, keeping: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> None:
    """Turns gradient checkpointing on: layers keep their inputs and run again in the backward pass.

    `keeping` wraps torch's checkpoint function, and decides where the inputs are kept.
    """
    if not can_recompute(model):
        raise UsageError(
            f"train.gradient_checkpointing: {type(model).__name__} does not support it. "
            "Set it to false."
        )
    model.activation_checkpointing_enable({"use_reentrant": False})
    if keeping:
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                wrapped = keeping(module._gradient_checkpointing_func)
                module._gradient_checkpointing_func = wrapped


def routers_of(model: Any) -> list[nn.Module]:
    """The routers of a mixture of experts, from the first layer to the last; or none."""
    inner = getattr(model, "base_model", model)
    records: Any = getattr(inner, "_can_record_outputs", None) or {}
    named = records.get("router_logits", [])
    kinds = [
        getattr(one, "target_class", one) for one in (named if isinstance(named, list) else [named])
    ]
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    modules: list[nn.Module] = list(model.modules())
    return [module for module in modules if isinstance(module, classes)]


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers of a model's text decoder, from the first to the last; or none."""
    lists = (one for one in model.get_decoder().modules() if isinstance(one, nn.ModuleList))
    kind = GradientCheckpointingLayer
    found = (layers for layers in lists if all(isinstance(layer, kind) for layer in layers))
    return list(next((layers for layers in found if len(layers)), ()))


def beside_text(model: Any) -> set[str]:
    """The tensors of a composite that no text runs through: its towers and projectors."""
    if model.config.get_text_config(decoder=True) is model.config:
        return set()
    parts = (model.get_decoder(), model.get_output_embeddings(), getattr(model, "score", None))
    states = [part.state_dict(keep_vars=True) for part in parts if part is not None]
    of_text = {id(tensor) for state in states for tensor in state.values()}
    every: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {name for name, tensor in every.items() if id(tensor) not in of_text}


def stored_names(model: Any, stored: Iterable[str]) -> dict[str, list[str]]:
    """The stored tensors that each tensor of a model is made of, as transformers renames them.

    Of several tensors that are made of the same ones the first is named.
    """
    changes = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [one for one in changes if isinstance(one, core_model_loading.WeightRenaming)]
    converters = [one for one in changes if isinstance(one, core_model_loading.WeightConverter)]
    wanted, prefix = model.state_dict(), model.base_model_prefix
    rename: Any = core_model_loading.rename_source_key
    found: dict[str, list[str]] = {}
    for name in sorted(stored, key=core_model_loading.dot_natural_key):
        renamed, _ = rename(name, renamings, converters, prefix, wanted)
        if renamed not in wanted and name in wanted:
            renamed, _ = rename(name, [], [], prefix, wanted)
        if renamed in wanted:
            found.setdefault(renamed, []).append(name)
    return found
