"""Access to transformers beyond its public names: layers, routers, stored names, quiet loading.

Its modelling code imports losses for object detection, which load scipy if it is installed and cost
every model 36 MiB. They are imported here as if scipy were not installed.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import utils

from ...schemas.errors import UsageError

_utils: Any = utils
_is_scipy_available = _utils.is_scipy_available
_utils.is_scipy_available = lambda: False
try:
    from transformers import conversion_mapping, core_model_loading, modeling_utils
    from transformers.integrations import hub_kernels
    from transformers.models.auto import auto_factory, modeling_auto
finally:
    _utils.is_scipy_available = _is_scipy_available

AttentionInterface: Any = modeling_utils.AttentionInterface
# It names a missing package once for each function; the probe names all in one line.
logging.getLogger(hub_kernels.__name__).setLevel(logging.ERROR)
SCORES = "ForSequenceClassification"  # how transformers names models that score texts

# More than one process needs for its models, dtypes and kinds of gradients. Beyond its own limit of
# 8, torch leaves a function uncompiled, or refuses it.
COMPILATIONS = 1024

TORCH_CHUNK = 64  # tokens


_LOCK = threading.Lock()
_CHANGES = ExitStack()  # restores the settings that the first thread changed
_inside = 0


@contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings, progress bars and advice of libraries in the block.

    These settings are global, and a model may be loaded in a thread of its own: the first thread
    changes them, and the last one restores them.
    """
    global _inside  # noqa: PLW0603 - one count for the process
    with _LOCK:
        if not _inside:
            _CHANGES.enter_context(_silenced())
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                _CHANGES.close()


@contextmanager
def _silenced() -> Iterator[None]:
    logs: Any = _utils.logging
    packer = logging.getLogger("bitsandbytes")  # peft imports it wherever it is installed
    verbosity, bars, level = logs.get_verbosity(), logs.is_progress_bar_enabled(), packer.level
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    packer.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        packer.setLevel(level)
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()


def is_reward_model(model: Any) -> bool:
    """Whether a transformers model scores texts."""
    return type(model).__name__.endswith(SCORES)


def attention_of(model: Any) -> str:
    """The name of a model's attention implementation."""
    name: str | None = model.config._attn_implementation
    return name or "eager"


def text_kind(config: Any) -> Any:
    """transformers' auto class of a language model: the one that has the class of config.json.

    Many composites also have a class of their text part alone. It names layers otherwise: an
    adapter that was made with one of the two does not load with the other.
    """
    causal: Any = modeling_auto.AutoModelForCausalLM
    composite: Any = modeling_auto.AutoModelForImageTextToText
    found = composite._model_mapping.get(type(config), None)
    if found is None or config.is_encoder_decoder:
        return causal
    alone = causal._model_mapping.get(type(config), None)
    named = config.architectures or [found.__name__]
    return causal if alone and alone.__name__ in named else composite


def supports_sdpa(config: Any) -> bool:
    """Whether the language model of a config has sdpa; raises any type if there is none."""
    get: Any = auto_factory._get_model_class
    supported: bool = get(config, text_kind(config)._model_mapping)._supports_sdpa
    return supported


def can_recompute(model: Any) -> bool:
    """Whether the model's class supports gradient checkpointing and a module implements it."""
    is_supported: bool = model.supports_gradient_checkpointing
    return is_supported and any(hasattr(one, "gradient_checkpointing") for one in model.modules())


def recompute_activations(
    model: Any, keeping: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> None:
    """Enables gradient checkpointing: layers keep inputs and are recomputed in the backward pass.

    `keeping` wraps torch's checkpoint function, to keep the inputs elsewhere.
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
    """The routers of a mixture of experts, in layer order; empty for other models."""
    inner = model.get_decoder() if hasattr(model, "get_decoder") else model
    records: Any = getattr(inner, "_can_record_outputs", None) or {}
    named = records.get("router_logits", [])
    kinds = [
        getattr(one, "target_class", one) for one in (named if isinstance(named, list) else [named])
    ]
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    modules: list[nn.Module] = list(model.modules())
    return [module for module in modules if isinstance(module, classes)]


def missing_kernels(model: Any) -> list[str]:
    """Packages for want of which torch's own code runs convolutions and recurrences of a model."""
    if not any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return []
    found = set[str]()
    for function in vars(sys.modules[type(model.get_decoder()).__module__]).values():
        closed = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        if closed.get("is_new_implementation") is False:  # transformers' choice at its import
            known: Any = hub_kernels
            found.add(known._PACKAGE_TO_DISTRIBUTION.get(closed["package"], closed["package"]))
    return sorted(found)


def shorten_chunks(model: Any) -> None:
    """Lets torch's own scans pad rows to chunks of 64 tokens instead of a kernel's 128 or 256.

    With 256 (Granite 4) they take twice as long; other chunks change only the order of sums.
    """
    if "mamba_ssm" not in missing_kernels(model):
        return
    for module in model.modules():
        if isinstance(getattr(module, "chunk_size", None), int):
            module.chunk_size = min(module.chunk_size, TORCH_CHUNK)


def allow_compilations() -> None:
    """Raises torch's limits on compilations of one function."""
    limits: Any = torch.compiler.config
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(limits, name, max(getattr(limits, name), COMPILATIONS))


def is_composite(model: Any) -> bool:
    """Whether a model has other parts, such as a vision tower, beside its language model."""
    return model.config.get_text_config(decoder=True) is not model.config


def drop_towers(model: Any) -> None:
    """Removes the parts of a composite that a pass over text does not call; None stands there."""
    if is_composite(model):
        _drop_others(model, set(_text_parts(model)))


def _drop_others(owner: nn.Module, kept: set[nn.Module]) -> None:
    for name, _ in list(owner.named_parameters(recurse=False)):
        setattr(owner, name, None)
    for name, child in list(owner.named_children()):
        if child in kept or hasattr(child, "vocab_offset"):
            continue  # Gemma 3n gives every token to these embeddings of images and audio too
        if kept.isdisjoint(child.modules()):
            setattr(owner, name, None)
        else:
            _drop_others(child, kept)


def _text_parts(model: Any) -> list[nn.Module]:
    """The language model of a composite, and its head for tokens or scores."""
    parts = (model.get_decoder(), model.get_output_embeddings(), getattr(model, "score", None))
    return [part for part in parts if part is not None]


def beside_text(model: Any) -> set[str]:
    """The tensors of a composite outside its text part: towers and projectors."""
    if not is_composite(model):
        return set()
    states = [part.state_dict(keep_vars=True) for part in _text_parts(model)]
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
