"""The optimizers of `train.optimizer`: their configuration for DeepSpeed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...schemas.train_options import TrainOptions

# Their types in DeepSpeed's configuration.
TYPES = {"adamw": "AdamW", "adamw8bit": "align.AdamW8bit"}
ADAM_TYPES = ("adam", "adamw")  # DeepSpeed's, in any letter case
# State values per element, each as large as a master weight; lion is one that a file may name.
_STATES = {"adam": 2.0, "adamw": 2.0, "lion": 1.0, "align.adamw8bit": 0.5}


def states_of(kind: str) -> float:
    """The state values per element that an optimizer of this type keeps."""
    return _STATES.get(kind.lower(), 0.0)


def optimizer_block(options: TrainOptions) -> dict[str, Any]:
    """The part of the configuration that `train.optimizer` decides."""
    params = {
        "lr": options.lr,
        "betas": [options.beta1, options.beta2],
        "eps": options.epsilon,
        "weight_decay": options.weight_decay,
    }
    block: dict[str, Any] = {"optimizer": {"type": TYPES[options.optimizer], "params": params}}
    if options.optimizer == "adamw8bit":
        # DeepSpeed tests its own optimizers only.
        block |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return block


def completed_block(config: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The optimizer's block with the implementation of AdamW for this device."""
    block: dict[str, Any] = dict(config["optimizer"])
    if block["type"] != "AdamW" or (device == "cuda" and offloads_optimizer(config)):
        return block  # DeepSpeed's AdamW of states in the CPU's memory is made for the CPU
    # DeepSpeed's own kernels are compiled at the first start, which needs a compiler.
    torchs = {"torch_adam": True, **({"fused": True} if device == "cuda" else {})}
    return block | {"params": block["params"] | torchs}


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state is in the CPU's memory, or on a disk."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(offload.get("device", "none") != "none")


def asks_for_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed uses its CPU AdamW, which has to be compiled."""
    block = config.get("optimizer", {})
    is_adam = str(block.get("type", "")).lower() in ADAM_TYPES
    return is_adam and offloads_optimizer(config) and not block.get("params", {}).get("torch_adam")


def without_cpu_adam(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with torch's AdamW instead of CPU AdamW."""
    block = config["optimizer"]
    params = block.get("params", {}) | {"torch_adam": True, "fused": True}
    return {**config, "optimizer": block | {"params": params}}


def own_optimizer(config: dict[str, Any]) -> Callable[[Any], torch.optim.Optimizer] | None:
    """A constructor of AdamW in 8 bits from parameter groups; None if DeepSpeed constructs it.

    The optimizer's block is removed from the configuration, which is passed to DeepSpeed.
    """
    if config.get("optimizer", {}).get("type") != TYPES["adamw8bit"]:
        return None
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it advises to install a kernel
    from bitsandbytes import optim  # noqa: PLC0415 - optional

    public: Any = optim
    params = config.pop("optimizer")["params"]
    return lambda groups: public.AdamW8bit(groups, **params)
