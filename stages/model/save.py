"""Writes a trained policy as a folder that transformers, or peft, loads back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from ...schemas.config import ModelOptions
from .loading.heads import VALUE_HEAD, is_reward_model
from .loading.load import load_model, merged, with_adapter
from .loading.quiet import quiet
from .logprobs import causal_model
from .reward_model import load_reward_model

# What a folder needs for chat and generation in addition to weights and config.json.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
)

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of a config that generation uses


def save_whole(
    policy: nn.Module, weights: Mapping[str, Tensor], source: Path, target: Path
) -> None:
    """Writes all weights, with the config, tokenizer and template of the source folder."""
    model: Any = causal_model(policy)
    with quiet():
        model.save_pretrained(target, state_dict=dict(weights))
    _write_config(source, target, model)
    _copy_companions(source, target)


def save_adapter(policy: Any, weights: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """Writes the adapter alone; its config names the folder of its base."""
    with quiet():
        policy.save_pretrained(target, state_dict=dict(weights))
    _copy_companions(source, target)


def save_merged(base: ModelOptions, adapter: Path, target: Path, *, scores: bool) -> None:
    """Writes the base with a saved adapter merged into its weights; loads both again."""
    source, options = Path(base.path), replace(base, adapter="", device="cpu")
    # The head for scores that is drawn here is replaced by the adapter's.
    plain = load_reward_model(options, seed=0) if scores else load_model(options)
    with quiet():
        model: Any = merged(with_adapter(plain, str(adapter)))
        model.save_pretrained(target)
    _write_config(source, target, model)
    _copy_companions(source, target)


def stop_generation_at(tokens: Collection[int], source: Path, target: Path) -> None:
    """Adds the tokens that completions ended with to the saved model's stop tokens."""
    path = target / "generation_config.json"
    if path.is_file():
        settings = json.loads(path.read_text(encoding="utf-8"))
    else:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        settings = {name: config[name] for name in _TOKENS if config.get(name) is not None}
    own = settings.get("eos_token_id")
    known = own if isinstance(own, list) else [] if own is None else [own]
    if missing := sorted(set(tokens).difference(known)):
        settings["eos_token_id"] = [*known, *missing]
        path.write_text(f"{json.dumps(settings, indent=2, sort_keys=True)}\n", encoding="utf-8")


def parted(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's own weights, and its value head's weights by their names in the head."""
    prefix = f"{VALUE_HEAD}."
    own = {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}
    beside = {name.removeprefix(prefix): weights[name] for name in weights.keys() - own.keys()}
    return own, beside


def save_value_head(weights: Mapping[str, Tensor], target: Path) -> None:
    """Writes the value head to a file of its own next to the model."""
    (target / f"{VALUE_HEAD}.safetensors").write_bytes(save(dict(weights)))


def _write_config(source: Path, target: Path, model: Any) -> None:
    """Writes the source's config: training changes the one in memory (dropout, attention)."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    if is_reward_model(model):
        config["architectures"] = [type(model).__name__]
        for name in ("id2label", "label2id", "pad_token_id"):
            config[name] = getattr(model.config, name)
    text = json.dumps(config, indent=2, sort_keys=True)
    (target / "config.json").write_text(f"{text}\n", encoding="utf-8")


def _copy_companions(source: Path, target: Path) -> None:
    (target / "generation_config.json").unlink(missing_ok=True)
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
