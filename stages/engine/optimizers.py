"""The optimizers of `train.optimizer`: their configuration for DeepSpeed, and our own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...schemas.errors import UsageError
from ...schemas.train_options import TrainOptions
from .update_rules import Lion, Muon

OWN = "align."  # prefix of the type of an optimizer that is passed to DeepSpeed as an object
EVERY_STAGE = frozenset(range(4))
ADAM_TYPES = ("adam", "adamw")  # DeepSpeed's, in any letter case


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer that `train.optimizer` names."""

    type: str  # in DeepSpeed's configuration
    reads: tuple[str, ...]  # of train.beta1, train.beta2 and train.epsilon
    states: float  # state values per element, each as large as a master weight
    stages: frozenset[int] = EVERY_STAGE
    make: Callable[..., torch.optim.Optimizer] | None = None  # from groups and parameters
    why: str = ""  # the other stages do not fit
    most_states: float = 0.0  # state values per element of the matrices that need more
    is_for_matrices: bool = False  # updates matrices as wholes, all else as AdamW does
    needs_bitsandbytes: bool = False


def _adafactor(groups: Any, **params: Any) -> torch.optim.Optimizer:
    from transformers import Adafactor  # noqa: PLC0415 - slow to import

    make: Any = Adafactor
    # The schedule decides the learning rate, not the optimizer.
    optimizer: torch.optim.Optimizer = make(
        groups, scale_parameter=False, relative_step=False, **params
    )
    return optimizer


def _adamw8bit(groups: Any, **params: Any) -> torch.optim.Optimizer:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it advises to install a kernel
    from bitsandbytes import optim  # noqa: PLC0415 - optional

    public: Any = optim
    optimizer: torch.optim.Optimizer = public.AdamW8bit(groups, **params)
    return optimizer


KINDS = {
    "adamw": OptimizerKind("AdamW", ("beta1", "beta2", "epsilon"), states=2.0),
    "lion": OptimizerKind(f"{OWN}Lion", ("beta1", "beta2"), states=1.0, make=Lion),
    "adafactor": OptimizerKind(
        f"{OWN}Adafactor",
        (),
        states=0.0,
        stages=frozenset({0}),
        make=_adafactor,
        why="keeps a moment of each row and column of a matrix",
    ),
    "muon": OptimizerKind(
        f"{OWN}Muon",
        ("beta1", "beta2", "epsilon"),
        states=1.0,
        stages=frozenset({0}),
        make=Muon,
        why="makes the update of each matrix orthogonal",
        most_states=2.0,
        is_for_matrices=True,
    ),
    "adamw8bit": OptimizerKind(
        f"{OWN}AdamW8bit",
        ("beta1", "beta2", "epsilon"),
        states=0.5,
        make=_adamw8bit,
        needs_bitsandbytes=True,
    ),
}
BY_TYPE = {kind.type: kind for kind in KINDS.values()}
# State values per element of other optimizers that a DeepSpeed file may name, in lower case.
DEEPSPEEDS = {"adam": 2.0, "lion": 1.0}


def kind_of(config: Mapping[str, Any]) -> OptimizerKind | None:
    """The kind that DeepSpeed's configuration names; None for any other optimizer."""
    return BY_TYPE.get(config.get("optimizer", {}).get("type", ""))


def most_states(config: Mapping[str, Any]) -> float:
    """The most state values per element that a configuration's optimizer keeps."""
    named = str(config.get("optimizer", {}).get("type", "")).lower()
    found = [kind for kind in KINDS.values() if kind.type.lower() == named]
    return max(found[0].states, found[0].most_states) if found else DEEPSPEEDS.get(named, 0.0)


def optimizer_block(options: TrainOptions) -> dict[str, Any]:
    """The part of the configuration that `train.optimizer` decides."""
    kind = KINDS[options.optimizer]
    params: dict[str, Any] = {"lr": options.lr}
    if "beta1" in kind.reads:
        params["betas"] = [options.beta1, options.beta2]
    if "epsilon" in kind.reads:
        params["eps"] = options.epsilon
    block: dict[str, Any] = {
        "optimizer": {"type": kind.type, "params": params | {"weight_decay": options.weight_decay}}
    }
    if kind.make:
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


def require_fitting_stage(config: Mapping[str, Any], deepspeed: str) -> None:
    """Refuses an optimizer under a ZeRO stage that gives it other tensors than it needs."""
    kind = kind_of(config)
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if kind is None or stage in kind.stages:
        return
    name = next(name for name, one in KINDS.items() if one is kind)
    raise UsageError(
        f"train.optimizer is {name}, which {kind.why}, and train.deepspeed={deepspeed} is ZeRO "
        f"{stage}, which gives it parts of flat tensors. Use --deepspeed zero0, or another "
        "train.optimizer."
    )


def own_optimizer(config: dict[str, Any]) -> Callable[[Any], torch.optim.Optimizer] | None:
    """A constructor of our optimizer from parameter groups; None if DeepSpeed constructs it.

    The optimizer's block is removed from the configuration, which is passed to DeepSpeed.
    """
    kind = kind_of(config)
    if kind is None or kind.make is None:
        return None
    make, params = kind.make, config.pop("optimizer")["params"]
    return lambda groups: make(groups, **params)
