"""Refuses model folders that make transformers fetch code, or load other weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...schemas.errors import UsageError
from .fingerprint import adapter_tensors, model_config, read_json

# Any other name may stand for a kernel, which transformers fetches from the Hub and runs.
ATTENTION = frozenset({"eager", "sdpa"})
EXPERTS = frozenset({"eager", "grouped_mm", "batched_mm"})
# These are carried out by torch or by a package that the user has installed.
QUANTIZERS = frozenset(
    {"awq", "bitsandbytes", "compressed-tensors", "gptq", "hqq", "mxfp4", "quanto", "torchao"}
)
# transformers takes such files instead of the ones whose digest names the model.
_SHARDS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


def require_plain_folder(folder: str) -> None:
    """Refuses, by its name, every setting that brings in other weights or unknown code."""
    config, file = model_config(folder), Path(folder) / "config.json"
    for name, value in _entries(config):
        _require_known(file, name, value)
    root = Path(folder)
    if (root / "adapter_config.json").exists():
        raise UsageError(
            f"{root / 'adapter_config.json'}: transformers would put this adapter on the model by "
            "itself. Move it to a folder of its own, and name that by model.adapter."
        )
    if shards := sorted(file.name for file in root.iterdir() if _SHARDS.fullmatch(file.name)):
        raise UsageError(
            f"{root / shards[0]}: transformers would load this and not model.safetensors. Load the "
            "model you trust and save_pretrained it to another folder."
        )


def require_peft() -> None:
    """Refuses adapters where the package for them is not installed."""
    if find_spec("peft") is None:
        raise UsageError("Adapters and --lora need the package peft. Install it: pip install peft")


def require_adapter(folder: str) -> None:
    """Refuses an adapter folder whose settings name code, or whose tensors are not safetensors."""
    require_peft()
    file = Path(folder) / "adapter_config.json"
    if read_json(file).get("megatron_config"):
        raise UsageError(
            f"{file}: megatron_config makes peft import a module of Megatron, which is not "
            "supported. Set model.adapter to an adapter for a transformers model."
        )
    adapter_tensors(Path(folder))


def loading_options(folder: str) -> dict[str, Any]:
    """What else transformers is given: no kernel of the Hub computes with packed weights."""
    quantized = model_config(folder).get("quantization_config") or {}
    if quantized.get("quant_method") != "mxfp4":
        return {}
    import transformers  # noqa: PLC0415 - heavy, and rarely needed

    public: Any = transformers  # its stub names few of its classes
    return {"quantization_config": public.Mxfp4Config(dequantize=True)}


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a config by its dotted name, those of its parts included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{name}.{key}" if name else key, item
            yield from _entries(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _entries(item, f"{name}[{index}]")


def _require_known(file: Path, name: str, value: Any) -> None:
    key = name.rpartition(".")[2]
    if key.endswith(("attn_implementation", "attn_implementation_internal")):
        _require_names(file, name, value, ATTENTION)
    elif key.endswith(("experts_implementation", "experts_implementation_internal")):
        _require_names(file, name, value, EXPERTS)
    elif key == "quantization_config" and isinstance(value, dict):
        _require_names(file, f"{name}.quant_method", value.get("quant_method"), QUANTIZERS)
    elif key == "transformers_weights" and value:
        raise UsageError(
            f"{file}: {name} is {value!r}: transformers would load that file and not "
            "model.safetensors. Take the entry out."
        )
    elif key == "auto_map" and "--" in str(value):
        raise UsageError(
            f"{file}: {name} is {value!r}: code of another repository. Take the entry out, or "
            "copy that code, which you trust, into the folder."
        )


def _require_names(file: Path, name: str, value: Any, known: frozenset[str]) -> None:
    """A value is one name, or one for each part of the model."""
    for given in value.values() if isinstance(value, dict) else [value]:
        if given is not None and not (isinstance(given, str) and given in known):
            raise UsageError(
                f"{file}: {name} is {given!r}, which may be code that transformers fetches from "
                f"the Hub. Known here: {', '.join(sorted(known))}. Take the entry out, or set it "
                "to one of these."
            )
