"""Puts a trainable LoRA adapter on a model, by peft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...schemas.errors import UsageError
from .load import first_line, quiet
from .scalar import is_reward_model

if TYPE_CHECKING:
    from torch import nn

    from ...schemas.config import LoraOptions


def add_lora(model: nn.Module, options: LoraOptions, seed: int) -> nn.Module:
    """The model with a fresh adapter, the same on every rank; everything else is frozen."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - optional, and slow to import

    settings = LoraConfig(
        # Beside the adapter peft trains and saves the whole head of a model that scores.
        task_type="SEQ_CLS" if is_reward_model(model) else "CAUSAL_LM",
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft divides it by the rank
        lora_dropout=options.dropout,
        target_modules=options.targets or "all-linear",
    )
    head = _name_of_head(model)
    try:
        with quiet(), torch.random.fork_rng():
            torch.manual_seed(seed)
            adapted: Any = get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise UsageError(
            f"lora.targets: {options.targets or 'all-linear'} cannot be adapted "
            f"({first_line(error)}). Name layers of this model, or leave lora.targets empty."
        ) from error
    if head in adapted.base_model.targeted_module_names:
        raise UsageError(
            f"lora.targets: {options.targets} includes the output layer {head}, whose adapter the "
            "fused log-prob head would pass by. Leave it out."
        )
    trainable: nn.Module = adapted
    return trainable


def merged(model: Any) -> nn.Module:
    """The plain model, its adapter added to the weights."""
    with quiet():
        plain: nn.Module = model.merge_and_unload()
    return plain


def _name_of_head(model: Any) -> str:
    layer = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is layer), "")
