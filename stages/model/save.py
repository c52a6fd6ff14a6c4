"""Writes a trained policy as a folder that transformers, or peft, loads back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adapter import merged
from .load import load_model, quiet
from .logps import causal_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from ...schemas.config import ModelOptions

# What makes a folder of weights a model that can be talked to, beside config.json.
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


def save_whole(
    policy: nn.Module, weights: Mapping[str, Tensor], source: Path, target: Path
) -> None:
    """All weights, with the config, tokenizer and template of the folder they came from."""
    model: Any = causal_model(policy)
    with quiet():
        model.save_pretrained(target, state_dict=dict(weights))
    # Training changes the config in memory: dropout off, an attention of its own.
    _write_config(source, target, dtype=str(model.dtype).removeprefix("torch."))
    _copy_companions(source, target)


def save_adapter(policy: Any, weights: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """The adapter alone, which names the folder of its base."""
    with quiet():
        policy.save_pretrained(target, state_dict=dict(weights))
    _copy_companions(source, target)


def save_merged(base: ModelOptions, adapter: Path, target: Path) -> None:
    """The base with a saved adapter merged into its weights; loads both anew."""
    source = Path(base.path)
    model: Any = merged(load_model(replace(base, adapter=str(adapter), device="cpu")))
    with quiet():
        model.save_pretrained(target)
    _write_config(source, target, dtype=str(model.dtype).removeprefix("torch."))
    _copy_companions(source, target)


def _write_config(source: Path, target: Path, *, dtype: str) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    text = json.dumps(config, indent=2, sort_keys=True)
    (target / "config.json").write_text(f"{text}\n", encoding="utf-8")


def _copy_companions(source: Path, target: Path) -> None:
    (target / "generation_config.json").unlink(missing_ok=True)
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
