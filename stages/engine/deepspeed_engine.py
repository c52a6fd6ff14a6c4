"""DeepSpeed as the trainer's engine: backward, reduction of gradients, update, state."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...schemas.batches import Update, World
from ...schemas.errors import UsageError
from ...schemas.train_options import TrainOptions
from . import deepspeed_state, distributed
from .deepspeed_compat import (
    CONFIG_ERROR,
    WRAPPED_OPTIMIZER,
    clear_partitions,
    deepspeed,
    forget_first_step,
    forget_passes,
    load_cpu_adam,
    quietly,
    whole_ndim,
)
from .deepspeed_config import TYPES, EngineContext, engine_config, offloads_optimizer, stage_of
from .deepspeed_state import whole_weights
from .freed_blocks import give_holes_back, giving_more_blocks_back

if TYPE_CHECKING:
    from ...schemas.rows import Tree

logger = logging.getLogger("align")


def open_engine(
    policy: nn.Module, options: TrainOptions | None, world: World, *, hidden_size: int
) -> tuple[DeepSpeedEngine, dict[str, Any]]:
    """The engine of a policy, sharded over the ranks, and DeepSpeed's resolved configuration.

    Without options it is an engine that only evaluates, with the whole policy on each rank.
    """
    if options is None:
        return DeepSpeedEngine(policy, world), {}
    first = next((one for one in policy.parameters() if one.requires_grad), None)
    if first is None:
        raise UsageError("the policy has no parameter that learns. Set lora.targets to its layers.")
    # An adapter may learn in float32 on a bfloat16 base, which DeepSpeed then leaves as it is.
    dtype = str(first.dtype).removeprefix("torch.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = engine_config(options, EngineContext(dtype, hidden_size, world.size, device))
    config = with_adam_for_cpu(config, world)
    is_partitioned = stage_of(config) == 3
    theirs = deepcopy(config)  # DeepSpeed changes its argument
    params = theirs["optimizer"].get("params", {})
    rate = params.get("lr")
    if rate is not None:
        # In 16 bits without ZeRO, DeepSpeed takes a step without gradients at creation, which must
        # not decay the weights.
        params["lr"] = 0.0
    make = own_optimizer(theirs)
    try:
        with quietly(), giving_more_blocks_back() if is_partitioned else nullcontext():
            engine, *_ = deepspeed.initialize(
                model=policy,
                optimizer=make,
                model_parameters=parameter_groups(policy, config),
                config=theirs,
            )
    except (
        AssertionError,
        ValueError,
        TypeError,
        KeyError,
        NotImplementedError,
        CONFIG_ERROR,
    ) as error:
        why = " ".join((str(error) or type(error).__name__).split())
        raise UsageError(
            f"DeepSpeed refuses train.deepspeed={options.deepspeed} with {dtype} ({why}). Change "
            "train.deepspeed."
        ) from error
    forget_first_step(engine)
    opened = DeepSpeedEngine(engine, world)
    if rate is not None:
        opened.set_lr(rate)
    return opened, config


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


def with_adam_for_cpu(config: dict[str, Any], world: World) -> dict[str, Any]:
    """The config, with torch's AdamW if a rank cannot compile DeepSpeed's for the CPU."""
    block = config.get("optimizer", {})
    params = block.get("params", {})
    is_adam = str(block.get("type", "")).lower() in {"adam", "adamw"}
    if not (is_adam and offloads_optimizer(config)) or params.get("torch_adam"):
        return config
    if world.rank == 0:
        logger.info(
            "Compiling DeepSpeed's AdamW for optimizer states in the CPU's memory, which takes "
            "about a minute the first time."
        )
    failure = ""
    try:
        with quietly():
            load_cpu_adam()
    except Exception as error:  # compilers fail in many ways; the reason is logged
        failure = str(error).partition(":")[0].partition("\n")[0] or type(error).__name__
    failures = [one for one in distributed.gathered(world, failure) if one]
    if not failures:
        return config
    if world.rank == 0:
        logger.warning(
            "DeepSpeed's AdamW for the CPU cannot be compiled (%s): torch's slower one is used. "
            "Install a C++ compiler and ninja to avoid this.",
            failures[0],
        )
    return {**config, "optimizer": block | {"params": params | {"torch_adam": True, "fused": True}}}


def parameter_groups(policy: nn.Module, config: Mapping[str, Any]) -> list[Any]:
    """Trained parameters in two groups: matrices with weight decay, biases and norms without."""
    learning = {name: one for name, one in policy.named_parameters() if one.requires_grad}
    if not config.get("optimizer", {}).get("params", {}).get("weight_decay"):
        return [*learning.values()]
    matrices, vectors = list[nn.Parameter](), list[nn.Parameter]()
    for name, one in learning.items():
        (vectors if whole_ndim(one) < 2 or name.endswith("bias") else matrices).append(one)
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class DeepSpeedEngine:
    """A policy, sharded over the ranks in any way, with its forward pass and updates."""

    def __init__(self, engine: Any, world: World) -> None:
        """`engine`: DeepSpeed's, or a policy that is only evaluated."""
        self._engine = engine
        self.world = world

    def forward(self, trees: Sequence[Tree]) -> Mapping[str, Tensor]:
        """Outputs of the policy for every completion token, in the order tree, branch, token.

        `logps` (T,) float32; `values` and `collision_logps`, (T,) each, if the policy has them. For
        a reward model `logps` are scores, (branches,). With balanced experts also `routing`, sums
        over all tokens: (layers, 2 * experts + 1) float64. All ranks call this together. Without
        trees, the tensors are empty and still carry a (zero) gradient.
        """
        names: tuple[str, ...] = getattr(self._engine, "module", self._engine).output_names
        return dict(zip(names, self._engine(tuple(trees)), strict=True))

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds this micro-batch's gradient; the last one of a step also reduces local gradients."""
        on_cpu = self._engine.device.type == "cpu"
        if on_cpu:
            give_holes_back()  # after the forward pass; below, after the backward pass
        self._engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages the gradients over ranks, but these must be summed.
        self._engine.backward(loss * self.world.size, scale_wrt_gas=False)
        if on_cpu:
            give_holes_back()

    def step(self) -> Update:
        """Clips, updates and clears the gradients; if one is not finite, only clears them."""
        engine = self._engine
        is_wrapped = isinstance(engine.optimizer, WRAPPED_OPTIMIZER)
        if not is_wrapped:
            # In float32 without ZeRO, DeepSpeed does not check the norm for NaN. The gradients are
            # already reduced, so every rank computes the same norm.
            gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if not math.isfinite(norm):
                self._clear_gradients()
                return Update(applied=False, grad_norm=norm)
        engine.step()
        if is_wrapped:
            norm = float(engine.get_global_grad_norm())
        applied = bool(engine.was_step_applied())
        if not applied:
            self._clear_gradients()
        return Update(applied=applied, grad_norm=norm)

    def skip(self) -> None:
        """Clears the gradients, also those of an interrupted pass, without an update."""
        forget_passes(self._engine.optimizer)
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        """Clears every gradient, also reduced ones."""
        self._engine.zero_grad()
        self._engine.optimizer.zero_grad(set_to_none=True)
        clear_partitions(self._engine.optimizer)

    def total(self, values: Tensor) -> Tensor:
        """The sum of float64 values over ranks."""
        return distributed.total(values)

    def learn_mode(self, *, dropout_seed: int | None) -> None:
        """Sets training mode with dropout from this seed; None sets evaluation mode.

        Gradient checkpointing works only in training mode, so gradients need a seed even for a
        policy without dropout.
        """
        self._engine.train(dropout_seed is not None)
        if dropout_seed is not None:
            # `torch.manual_seed` notes where it is called for each kind of device that is not here.
            torch.default_generator.manual_seed(dropout_seed)
            if self._engine.device.type == "cuda":
                torch.cuda.manual_seed_all(dropout_seed)

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of the next update."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr

    def save_state(self, folder: Path) -> tuple[str, ...]:
        """Writes this rank's state, for a bit-equal resume, into an empty folder.

        Returns the files this rank wrote, relative to the folder.
        """
        return deepspeed_state.save(self._engine, folder)

    def load_state(self, folder: Path) -> None:
        """Loads a state that any number of ranks saved in the same ZeRO stage."""
        deepspeed_state.load(self._engine, folder, self.world)

    def weights(self, *, trainable_only: bool = False) -> Mapping[str, Tensor]:
        """The policy's tensors on the CPU by parameter name; empty on all ranks except rank 0.

        All ranks call this together. Tied parameters appear once; saved buffers are included.
        """
        policy, rank = self._engine.module, self.world.rank
        return whole_weights(policy, rank=rank, trainable_only=trainable_only)
