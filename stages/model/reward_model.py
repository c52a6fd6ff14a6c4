"""Loads what a reward model begins as: a language model's layers under a head for one score."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ...schemas.errors import UsageError
from .adapter import merged
from .fingerprint import model_config
from .load import first_line, load_model, quiet
from .scalar import SCORES, ScalarHead

if TYPE_CHECKING:
    from ...schemas.config import ModelOptions

_ONE_LABEL = {"id2label": {0: "score"}, "label2id": {"score": 0}}


def load_reward_model(options: ModelOptions, seed: int) -> nn.Module:
    """The folder's own model where it is one that scores; else its layers with a drawn head."""
    architectures = model_config(options.path).get("architectures") or [""]
    if str(architectures[0]).endswith(SCORES):
        model: Any = load_model(options, AutoModelForSequenceClassification)
    else:
        model = _with_new_head(options, seed)
    _head_of(model, options.path).__class__ = ScalarHead
    model.config.pad_token_id = _padding_token(options.path, model.config)
    scorer: nn.Module = model
    return scorer


def _with_new_head(options: ModelOptions, seed: int) -> Any:
    """Takes over the layers of a causal model, its adapter, if any, merged into them."""
    causal: Any = load_model(options)
    if options.adapter:
        causal = merged(causal)
    config = causal.config
    model = _skeleton(options, config)
    if type(model.base_model) is not type(causal.base_model):
        raise UsageError(
            f"{options.path}: {type(model).__name__} is built on other layers than "
            f"{type(causal).__name__}. Use a model of text alone."
        )
    for name, value in _ONE_LABEL.items():
        setattr(config, name, value)
    # One config for all of it: layers look their attention up in theirs.
    model.config = config
    setattr(model, model.base_model_prefix, causal.base_model)
    head = _head_of(model, options.path).to(causal.dtype)
    head.to_empty(device=causal.get_input_embeddings().weight.device)
    _draw(head, getattr(config, "initializer_range", None), seed)
    return model


def _head_of(model: Any, folder: str) -> nn.Linear:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UsageError(
            f"{folder}: {type(model).__name__} does not end in one score. Use a causal model, or "
            "one that was trained with num_labels=1."
        )
    return head


def _skeleton(options: ModelOptions, config: Any) -> Any:
    """The architecture without storage, to be filled."""
    build: Any = AutoModelForSequenceClassification.from_config
    labelled = deepcopy(config)
    labelled.num_labels = 1
    try:
        with quiet(), torch.device("meta"):
            return build(labelled, trust_remote_code=options.trust_remote_code)
    except (ValueError, ImportError) as error:
        raise UsageError(
            f"{options.path}: transformers has no class of this architecture that scores texts "
            f"({first_line(error)}). Use a model of another one."
        ) from error


def _draw(head: nn.Linear, spread: float | None, seed: int) -> None:
    """As transformers draws it, but the same on every rank and device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(head.weight.shape, generator=generator)
    with torch.no_grad():
        head.weight.copy_(drawn * (spread or 1 / math.sqrt(head.in_features)))
        if head.bias is not None:
            head.bias.zero_()


def _padding_token(folder: str, config: Any) -> int:
    """What a batch of texts is filled up with by those who use the model.

    Any token will do that does not end a text; where there is none but EOS, that is it.
    """
    try:
        with quiet():
            own = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            ).pad_token_id
    except (OSError, ValueError, KeyError, TypeError):
        own = None
    eos = config.eos_token_id
    first_eos = eos[0] if isinstance(eos, list) and eos else eos
    for token in (own, config.pad_token_id, first_eos):
        if isinstance(token, int) and token >= 0:
            return token
    raise UsageError(
        f"{folder}: neither the tokenizer nor the config names a padding token or an EOS, and "
        "transformers cannot tell where a text in a batch ends. Set pad_token_id in config.json."
    )
