"""QLoRA: the frozen weights under an adapter, kept in 4 bits by bitsandbytes.

https://arxiv.org/abs/2305.14314
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from ....schemas.config import ModelOptions
from ....schemas.errors import UsageError
from .load import DTYPES, from_folder, resolve
from .model_folder import model_config
from .placement import rank_device
from .quiet import quiet


def require_bitsandbytes(setting: str) -> None:
    """Refuses a setting that needs bitsandbytes where it is not installed."""
    if find_spec("bitsandbytes") is None:
        raise UsageError(
            f"{setting} needs the package bitsandbytes. Install it: pip install bitsandbytes"
        )


def load_in_4_bits(options: ModelOptions, kind: Any = AutoModelForCausalLM) -> nn.Module:
    """The model with every linear layer but its head in NF4, whose scales are quantized too."""
    if options.adapter or "quantization_config" in model_config(options.path):
        what = f"adapter {options.adapter}" if options.adapter else "weights that are quantized"
        raise UsageError(
            f"{options.path} has the {what}, and lora.quantize makes 4 bits of plain weights only. "
            "Merge them into a plain model first, or set lora.quantize to none."
        )
    resolved = resolve(options)
    public: Any = transformers  # its stub names few of its classes
    packing = public.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[resolved.dtype],
    )
    # Each layer is packed as it is read: the whole model in 16 bits is never on the device.
    whole = replace(options, device_map=rank_device(resolved.device))
    with quiet():
        model, _ = from_folder(whole, resolved, kind, {"quantization_config": packing})
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Some CPUs would pack the weights anew, and more coarsely, for evaluation.
            module.support_avx512bf16_for_cpu = False
    loaded: nn.Module = model
    return loaded
