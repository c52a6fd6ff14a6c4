"""Writes a trained policy as a folder that transformers, or peft, loads back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from ...schemas.config import ModelOptions
from .adapters import merged, with_adapter
from .load import load_model
from .logprobs import causal_model
from .model_folder import (
    COMPANIONS,
    INDEX,
    StoredTensor,
    model_config,
    model_tensors,
    stored_bytes,
    tensors_of,
    text_settings,
)
from .policy import VALUE_HEAD
from .reward_model import load_reward_model
from .transformers_compat import beside_text, is_reward_model, quiet, stored_names

_CAUSAL_HEADS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of a config that generation uses


def save_whole(
    policy: nn.Module, weights: Mapping[str, Tensor], source: Path, target: Path
) -> None:
    """Writes all weights, with the config, tokenizer and template of the source folder."""
    _write(causal_model(policy), weights, source, target)


def save_adapter(policy: Any, weights: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """Writes only the adapter; its config names the folder of its base."""
    with quiet():
        policy.save_pretrained(target, state_dict=dict(weights))
    _copy_companions(source, target)


def save_merged(base: ModelOptions, adapter: Path, target: Path, *, scores: bool) -> None:
    """Writes the base with a saved adapter merged into its weights; loads both again."""
    source, options = Path(base.path), replace(base, adapter="", device="cpu")
    # The random score head is replaced by the adapter's.
    plain = load_reward_model(options, seed=0) if scores else load_model(options)
    with quiet():
        model = merged(with_adapter(plain, str(adapter)))
    _write(model, model.state_dict(), source, target)


def stop_generation_at(tokens: Collection[int], source: Path, target: Path) -> None:
    """Adds the tokens that completions ended with to the saved model's stop tokens."""
    path = target / "generation_config.json"
    if path.is_file():
        settings = json.loads(path.read_text(encoding="utf-8"))
    else:
        config = text_settings(model_config(str(source)))
        settings = {name: config[name] for name in _TOKENS if name in config}
    own = settings.get("eos_token_id")
    known = own if isinstance(own, list) else [own]
    if own is None:
        known = []
    if missing := sorted(set(tokens).difference(known)):
        settings["eos_token_id"] = [*known, *missing]
        path.write_text(f"{json.dumps(settings, indent=2, sort_keys=True)}\n", encoding="utf-8")


def parted(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's weights, and the value head's weights by their names in the head."""
    prefix = f"{VALUE_HEAD}."
    own = {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}
    beside = {name.removeprefix(prefix): weights[name] for name in weights.keys() - own.keys()}
    return own, beside


def save_value_head(weights: Mapping[str, Tensor], target: Path) -> None:
    """Writes the value head to a file of its own next to the model."""
    (target / f"{VALUE_HEAD}.safetensors").write_bytes(save(dict(weights)))


def _write(model: Any, weights: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """Writes a folder with every tensor of the source: the trained ones, others as stored."""
    config = model_config(str(source))
    is_packed = "quantization_config" in config
    is_unpacked = is_packed and not hasattr(model.config, "quantization_config")
    others = set() if is_packed else beside_text(model)
    text = {name: tensor for name, tensor in weights.items() if name not in others}
    if is_unpacked:
        del config["quantization_config"]
    with quiet():
        # transformers would give dequantized weights the names of their quantized halves.
        model.save_pretrained(target, state_dict=text, save_original_format=not is_unpacked)
    if not is_packed and (untouched := _untouched(model, others, source)):
        _add_shard(untouched, target)
    _write_config(config, target, model)
    _copy_companions(source, target)


def _untouched(model: Any, others: set[str], source: Path) -> list[StoredTensor]:
    """The stored tensors of the source that are not of the text part, or not of the model."""
    stored = {tensor.name: tensor for tensor in model_tensors(source)}
    made = stored_names(model, stored)
    names = stored.keys() - {n for name in made.keys() - others for n in made[name]}
    if is_reward_model(model):
        names = {name for name in names if not name.endswith(_CAUSAL_HEADS)}
    return [stored[name] for name in sorted(names)]


def _add_shard(tensors: Sequence[StoredTensor], target: Path) -> None:
    """Adds a shard with a copy of stored tensors, and writes an index of all shards."""
    shards = [*sorted(target.glob("model*.safetensors")), target / "untouched.safetensors"]
    _copy_tensors(tensors, shards[-1])
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, shard in enumerate(shards, start=1):
        path = target / f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard.rename(path)
        for tensor in tensors_of([path]):
            index["weight_map"][tensor.name] = path.name
            index["metadata"]["total_size"] += tensor.num_bytes
    (target / INDEX).write_text(f"{json.dumps(index, indent=2)}\n", encoding="utf-8")


def _copy_tensors(tensors: Sequence[StoredTensor], path: Path) -> None:
    """Writes stored tensors as a safetensors file, block by block: a tower may be large."""
    # The widest types first, as safetensors writes them, so that each starts at a multiple of its.
    tensors = sorted(tensors, key=lambda one: -(one.num_bytes // max(1, prod(one.shape))))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
        header[tensor.name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.writelines(stored_bytes(tensor))


def _write_config(config: dict[str, Any], target: Path, model: Any) -> None:
    """Writes the source's config, because training changes the one in memory."""
    for gone in ("torch_dtype", "_name_or_path"):  # transformers writes neither
        config.pop(gone, None)
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    if is_reward_model(model):
        config["architectures"] = [type(model).__name__]
        config |= {name: getattr(model.config, name) for name in ("id2label", "label2id")}
        padding = model.config.get_text_config(decoder=True).pad_token_id
        config.get("text_config", config)["pad_token_id"] = padding
    text = json.dumps(config, indent=2, sort_keys=True)
    (target / "config.json").write_text(f"{text}\n", encoding="utf-8")


def _copy_companions(source: Path, target: Path) -> None:
    (target / "generation_config.json").unlink(missing_ok=True)
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
