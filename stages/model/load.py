"""Loads a causal language model by the options: with an adapter, or in 4 bits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig

from ...schemas.config import ModelOptions
from ...schemas.errors import UsageError
from .adapters import with_adapter
from .library_errors import as_usage_error
from .model_folder import CONFIG, model_config, require_own_weights, stored_dtype
from .transformers_compat import drop_towers, quiet, shorten_chunks, supports_sdpa, text_kind

_public: Any = transformers  # its stub names few of its classes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

OTHER_CONFIG = "Use the config.json that belongs to these weights."

# Constants that old GPT-2-like models store in each layer; transformers ignores only some.
_CAUSAL_MASK = re.compile(r"\.(attn|attention)\.(attention\.)?(masked_)?bias$")


@dataclass(frozen=True)
class Resolved:
    """The options with every `auto` resolved."""

    dtype: str
    attention: str
    device: str  # cpu or cuda
    kind: Any  # transformers' auto class of the language model
    hidden_size: int
    context: int | None  # most tokens of a text; None: no bound


def load_causal_lm(options: ModelOptions) -> nn.Module:
    """The frozen model on its device, with its adapter active and dropout off."""
    return load_model(options).eval().requires_grad_(False)


def load_model(options: ModelOptions, kind: Any = None) -> nn.Module:
    """The model on its device, with its adapter active.

    `kind` is the auto class of models that score; without it, a language model is loaded.
    """
    resolved = resolve(options)
    with quiet():
        model, _ = from_folder(options, resolved, kind)
        if options.adapter:
            model = with_adapter(model, options.adapter)
    if not options.device_map:
        model.to(rank_device(resolved.device))
    loaded: nn.Module = model
    return loaded


def load_in_4_bits(options: ModelOptions, kind: Any = None) -> nn.Module:
    """The model with every linear layer except its head in NF4, with quantized scales.

    https://arxiv.org/abs/2305.14314
    """
    if options.adapter or "quantization_config" in model_config(options.path):
        what = f"the adapter {options.adapter}" if options.adapter else "quantized weights"
        raise UsageError(
            f"{options.path} has {what}, but lora.quantize needs plain weights. Merge them into a "
            "plain model first, or set lora.quantize to none."
        )
    resolved = resolve(options)
    packing = _public.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[resolved.dtype],
    )
    # Each layer is quantized as it is read: the device never holds the 16-bit model.
    options = replace(options, device_map=rank_device(resolved.device))
    with quiet():
        model, _ = from_folder(options, resolved, kind, {"quantization_config": packing})
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Some CPUs would quantize the weights again, more coarsely, for evaluation.
            module.support_avx512bf16_for_cpu = False
    packed: nn.Module = model
    return packed


def unused_weights(options: ModelOptions, kind: Any = None) -> list[str]:
    """Names of stored tensors that the model does not use; refused unless allowed.

    No tensor is read. Quantized weights are checked when they are loaded.
    """
    if "quantization_config" in model_config(options.path):
        return []
    with quiet():
        return from_folder(nowhere(options), resolve(options), kind)[1]


def nowhere(options: ModelOptions) -> ModelOptions:
    """The options of a model on the meta device, without weights."""
    return replace(options, device_map="meta")


def resolve(options: ModelOptions) -> Resolved:
    """The options with dtype, attention and device decided; no model is built."""
    settings = require_own_weights(options.path)
    with quiet():
        config = _config(options, settings)
    dtype = stored_dtype(options.path) if options.dtype == "auto" else options.dtype
    if dtype not in DTYPES:
        raise UsageError(
            f"{options.path}: the weights are stored as {dtype}. "
            f"Set model.dtype to one of {', '.join(DTYPES)}."
        )
    cannot = f"{Path(options.path) / CONFIG}: cannot be built as a causal language model"
    with as_usage_error(cannot, f"Use a causal model. {OTHER_CONFIG}"):
        has_sdpa = supports_sdpa(config)
    if options.attention == "sdpa" and not has_sdpa:
        raise UsageError(
            f"{options.path}: transformers has no sdpa for this architecture. "
            "Set model.attention to auto or eager."
        )
    of_text = config.get_text_config(decoder=True)
    best = "sdpa" if has_sdpa else "eager"
    return Resolved(
        dtype=dtype,
        attention=best if options.attention == "auto" else options.attention,
        device=chosen_device(options),
        kind=text_kind(config),
        hidden_size=int(of_text.hidden_size),
        context=getattr(of_text, "max_position_embeddings", None),
    )


def text_config(options: ModelOptions) -> Any:
    """The config of a model's text part."""
    with quiet():
        return _config(options, model_config(options.path)).get_text_config(decoder=True)


def empty_model(options: ModelOptions, dtype: str, kind: Any) -> nn.Module:
    """The model of config.json on the meta device; the folder needs no weights."""
    settings, file = require_own_weights(options.path), Path(options.path) / CONFIG
    cannot = f"{file}: no model can be built from it"
    with quiet(), torch.device("meta"), as_usage_error(cannot, OTHER_CONFIG):
        config = _config(options, settings)
        empty: nn.Module = (kind or text_kind(config)).from_config(
            config, dtype=DTYPES[dtype], trust_remote_code=False
        )
        drop_towers(empty)
        shorten_chunks(empty)
    return empty


def _config(options: ModelOptions, settings: dict[str, Any]) -> Any:
    """The config as transformers reads it; it expands some settings to one per layer."""
    remedy = (
        f"Use an architecture and settings that transformers {transformers.__version__} supports."
    )
    file = Path(options.path) / CONFIG
    if "auto_map" in settings and settings.get("model_type") not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"{file}: the model needs code from its folder, which align never runs. {remedy}"
        )
    with as_usage_error(f"{file}: transformers cannot read this model's config.json", remedy):
        return AutoConfig.from_pretrained(
            options.path, local_files_only=True, trust_remote_code=False
        )


def from_folder(
    options: ModelOptions, resolved: Resolved, kind: Any, packing: Mapping[str, Any] | None = None
) -> tuple[Any, list[str]]:
    """The folder's model without towers for images, and the names of tensors it does not use."""
    # cuDNN plans each new batch shape on the CPU. With changing lengths, that took three quarters
    # of a training step on an H100; torch has other kernels.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # A model on several devices imports DeepSpeed, which prints the accelerator that it finds.
    names_device = bool(options.device_map) and "DS_ACCELERATOR" not in os.environ
    if names_device:
        os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
    cannot = f"{options.path}: the model cannot be loaded from config.json and its weights"
    remedy = "Check the folder, model.device_map and model.dtype."
    try:
        with as_usage_error(cannot, remedy):
            model, report = (kind or resolved.kind).from_pretrained(
                options.path,
                dtype=DTYPES[resolved.dtype],
                attn_implementation=resolved.attention,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, and refused below with their names
                **(packing or _unpacking(options.path)),
                **({"device_map": options.device_map} if options.device_map else {}),
            )
    finally:
        if names_device:
            os.environ.pop("DS_ACCELERATOR", None)
    unused = _require_all_taken(options, report)
    # Quantized weights are saved as they are in memory, with the tower's.
    if "quantization_config" not in model_config(options.path):
        drop_towers(model)
    shorten_chunks(model)
    return model, unused


def _unpacking(folder: str) -> dict[str, Any]:
    """Arguments that dequantize MXFP4 weights; their kernel would be fetched from the Hub."""
    quantized = model_config(folder).get("quantization_config") or {}
    if quantized.get("quant_method") != "mxfp4":
        return {}
    return {"quantization_config": _public.Mxfp4Config(dequantize=True)}


def _require_all_taken(options: ModelOptions, report: Mapping[str, Any]) -> list[str]:
    """Refuses missing, mismatched and unused tensors in transformers' report of loading.

    Returns the names of unused tensors if these are allowed.
    """
    if missing := sorted(report["missing_keys"]):
        raise UsageError(
            f"{options.path}: the weights lack {len(missing)} tensors that config.json needs. "
            f"First: {missing[:10]}. Set model.path to a folder with all of them."
        )
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        raise UsageError(
            f"{options.path}: {len(mismatched)} tensors have another shape than in config.json. "
            f"First: {name} is {list(stored)}, not {list(wanted)}. {OTHER_CONFIG}"
        )
    unused = sorted(name for name in report["unexpected_keys"] if not _CAUSAL_MASK.search(name))
    if unused and not options.allow_unused_weights:
        raise UsageError(
            f"{options.path}: the model of config.json does not use {len(unused)} of the stored "
            f"tensors. First: {unused[:10]}. Use the config.json that belongs to these weights, or "
            "pass --set model.allow_unused_weights=true if the model does not need them."
        )
    return unused


def chosen_device(options: ModelOptions) -> str:
    """cpu or cuda, `auto` resolved."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("model.device is cuda, but torch finds no GPU here. Set it to auto.")
    if options.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return options.device


def device_bytes(device: str) -> int:
    """The memory of this process's GPU; 0 for a CPU, whose memory other processes share."""
    if device != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def rank_device(device: str) -> str:
    """The device of this rank; under a launcher every rank of a machine has its own GPU."""
    # Ranks of stage 1 do not communicate: they know only srun's variables, without LOCAL_RANK.
    of_srun = os.environ.get("SLURM_LOCALID", "") if "SLURM_STEP_ID" in os.environ else ""
    rank = os.environ.get("LOCAL_RANK", of_srun)
    if device != "cuda" or not rank.isdigit():
        return device
    return f"cuda:{int(rank) % torch.cuda.device_count()}"
