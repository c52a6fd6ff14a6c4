"""Loads reward models: a language model's layers under a head that scores a branch's last token."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ...schemas.config import ModelOptions
from ...schemas.errors import UsageError
from .adapters import merged
from .library_errors import in_short
from .load import load_model
from .logprobs import ScalarHead
from .model_folder import model_config
from .transformers_compat import SCORES, quiet


def load_reward_model(
    options: ModelOptions, seed: int, load: Callable[..., nn.Module] = load_model
) -> nn.Module:
    """The folder's reward model, or a causal model's layers under a random head."""
    if architecture(options.path).endswith(SCORES):
        model: Any = load(options, AutoModelForSequenceClassification)
    else:
        model = _with_new_head(options, seed, load)
    _head_of(model, options.path).__class__ = ScalarHead
    of_text = model.config.get_text_config(decoder=True)
    of_text.pad_token_id = _padding_token(options.path, of_text)
    scorer: nn.Module = model
    return scorer


def architecture(folder: str) -> str:
    """The class that a folder's config.json names; "" if none."""
    return str((model_config(folder).get("architectures") or [""])[0])


def _with_new_head(options: ModelOptions, seed: int, load: Callable[..., nn.Module]) -> Any:
    """A reward model on the layers of a causal model, with its adapter merged."""
    causal: Any = merged(load(options))
    config, labelled = causal.config, deepcopy(causal.config)
    labelled.num_labels = 1
    build: Any = AutoModelForSequenceClassification.from_config
    try:
        with quiet(), torch.device("meta"):  # filled with the loaded layers below
            model = build(labelled, trust_remote_code=False)
    except (ValueError, ImportError) as error:
        raise UsageError(
            f"{options.path}: transformers has no class of this architecture that scores texts "
            f"({in_short(error)}). Use another architecture."
        ) from error
    if type(model.base_model) is not type(causal.base_model):
        raise UsageError(
            f"{options.path}: {type(model).__name__} has other layers than "
            f"{type(causal).__name__}. Use a text-only model."
        )
    config.id2label, config.label2id = {0: "score"}, {"score": 0}
    # One config for all layers, because each layer reads its attention from its config.
    model.config = config
    setattr(model, model.base_model_prefix, causal.base_model)
    # transformers saves the layers under the names from which they were loaded.
    model._weight_conversions = getattr(causal, "_weight_conversions", None)
    head = _head_of(model, options.path).to(causal.dtype)
    head.to_empty(device=causal.get_input_embeddings().weight.device)
    of_text = config.get_text_config(decoder=True)
    _draw(head, getattr(of_text, "initializer_range", None), seed)
    return model


def _head_of(model: Any, folder: str) -> nn.Linear:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UsageError(
            f"{folder}: {type(model).__name__} does not output one score. Use a causal model, or "
            "one that was trained with num_labels=1."
        )
    return head


def _draw(head: nn.Linear, spread: float | None, seed: int) -> None:
    """Initializes the head like transformers, but equally on every rank and device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(head.weight.shape, generator=generator)
    with torch.no_grad():
        head.weight.copy_(drawn * (spread or 1 / math.sqrt(head.in_features)))
        if head.bias is not None:
            head.bias.zero_()


def _padding_token(folder: str, config: Any) -> int:
    """The padding token of a saved reward model: the tokenizer's, the config's, or else EOS."""
    try:
        with quiet():
            own = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            ).pad_token_id
    except (OSError, ValueError, KeyError, TypeError):
        own = None
    eos, padding = (getattr(config, name, None) for name in ("eos_token_id", "pad_token_id"))
    first_eos = eos[0] if isinstance(eos, list) and eos else eos
    for token in (own, padding, first_eos):
        if isinstance(token, int) and token >= 0:
            return token
    raise UsageError(
        f"{folder}: neither the tokenizer nor the config has a padding token or an EOS, which mark "
        "the end of a text in a batch. Set pad_token_id in config.json."
    )
