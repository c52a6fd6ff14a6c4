"""Adapters that change what a model says."""

import torch
from peft import LoraConfig, get_peft_model

from align.schemas.config import ModelOptions
from align.stages.model.load import load_causal_lm, quiet


def saved_adapter(folder, base, *, how=None, **settings):
    """A folder, as peft saves an adapter of a model's folder; `how` is what it is told there."""
    torch.manual_seed(1)
    drawn = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False} | settings
    with quiet():
        model = load_causal_lm(ModelOptions(path=str(base)))
        get_peft_model(model, LoraConfig(**drawn)).save_pretrained(folder, **(how or {}))
    return folder


def drawn_adapter(model):
    """Its second matrices are zero at first, and so would be the gradients of the first ones."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model
