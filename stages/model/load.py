"""Loads a causal language model as the options say, offline, in evaluation mode."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from ...schemas.errors import UsageError
from .fingerprint import model_config, stored_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from ...schemas.config import ModelOptions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Resolved:
    """Every `auto` of the options, decided."""

    dtype: str
    attention: str
    device: str  # cpu or cuda
    hidden_size: int


def load_causal_lm(options: ModelOptions) -> nn.Module:
    """The frozen model, its adapter active and dropout off, on its device."""
    return load_model(options).eval().requires_grad_(False)


def load_model(options: ModelOptions, kind: Any = AutoModelForCausalLM) -> nn.Module:
    """The model, its adapter active, on its device."""
    resolved = resolve(options)
    with quiet():
        model, report = _from_folder(options, resolved, kind)
        if missing := sorted(report["missing_keys"]):
            raise UsageError(
                f"{options.path}: the weights lack {len(missing)} tensors of the model. "
                f"First: {missing[:10]}. Set model.path to a folder with all of them."
            )
        if options.adapter:
            model = with_adapter(model, options.adapter)
    if not options.device_map:
        model.to(_place(resolved.device))
    loaded: nn.Module = model
    return loaded


def resolve(options: ModelOptions) -> Resolved:
    """Decides dtype, attention and device without reading a weight."""
    model_config(options.path)
    with quiet():
        config = _config(options)
        skeleton = _skeleton(config, options)
    return Resolved(
        dtype=_dtype(options),
        attention=skeleton.config._attn_implementation or "eager",
        device=_device(options),
        hidden_size=int(config.get_text_config(decoder=True).hidden_size),
    )


def _config(options: ModelOptions) -> Any:
    try:
        return AutoConfig.from_pretrained(
            options.path, local_files_only=True, trust_remote_code=options.trust_remote_code
        )
    except (ValueError, OSError, KeyError) as error:
        raise UsageError(
            f"{options.path}: transformers cannot read this model's config.json "
            f"({first_line(error)}). Use an architecture that transformers {_version()} knows, "
            "or set model.trust_remote_code if you trust the folder's code."
        ) from error


def _skeleton(config: Any, options: ModelOptions) -> Any:
    """The architecture without storage: it decides which attention it supports."""
    asked = {} if options.attention == "auto" else {"attn_implementation": options.attention}
    try:
        with torch.device("meta"):
            build: Any = AutoModelForCausalLM.from_config
            return build(config, trust_remote_code=options.trust_remote_code, **asked)
    except (ValueError, ImportError) as error:
        raise UsageError(
            f"{options.path}: cannot be built as a causal language model "
            f"({first_line(error)}). Use a causal model, or set model.attention to auto."
        ) from error


def _from_folder(options: ModelOptions, resolved: Resolved, kind: Any) -> Any:
    placement = {"device_map": options.device_map} if options.device_map else {}
    try:
        return kind.from_pretrained(
            options.path,
            dtype=DTYPES[resolved.dtype],
            attn_implementation=resolved.attention,
            trust_remote_code=options.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **placement,
        )
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(
            f"{options.path}: the model cannot be loaded ({first_line(error)}). "
            "Check the folder, model.device_map and model.dtype."
        ) from error


def with_adapter(model: Any, folder: str) -> Any:
    """The model with a saved adapter on it, which does not learn."""
    from peft import PeftConfig, PeftModel  # noqa: PLC0415 - optional, and slow to import

    try:
        kind = PeftConfig.from_pretrained(folder)
        if kind.is_prompt_learning:
            raise ValueError("adapters that add prompt tokens are not supported")
        return PeftModel.from_pretrained(model, folder, is_trainable=False)
    except (ValueError, OSError, RuntimeError) as error:
        raise UsageError(
            f"{folder}: the adapter cannot be put on the model ({first_line(error)}). "
            "Set model.adapter to a PEFT adapter made for model.path."
        ) from error


def _dtype(options: ModelOptions) -> str:
    dtype = stored_dtype(options.path) if options.dtype == "auto" else options.dtype
    if dtype not in DTYPES:
        raise UsageError(
            f"{options.path}: the weights are stored as {dtype}. "
            f"Set model.dtype to one of {', '.join(DTYPES)}."
        )
    return dtype


def _device(options: ModelOptions) -> str:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("model.device is cuda, but torch finds no GPU here. Set it to auto.")
    if options.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return options.device


def _place(device: str) -> str:
    """Under a launcher every rank of a machine has a GPU of its own."""
    rank = os.environ.get("LOCAL_RANK", "")
    if device != "cuda" or not rank.isdigit():
        return device
    return f"cuda:{int(rank) % torch.cuda.device_count()}"


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' progress bars and advice out of our output, then restores them."""
    logs: Any = transformers.utils.logging
    verbosity, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()


def first_line(error: Exception) -> str:
    """What another library says in its first line, for one of ours."""
    return str(error).strip().split("\n", maxsplit=1)[0]


def _version() -> str:
    return str(transformers.__version__)
