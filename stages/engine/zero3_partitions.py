"""ZeRO-3 partitions: parameters partitioned as they are created, before there is an engine."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...schemas.batches import World
from ...schemas.train_options import TrainOptions
from .deepspeed_compat import (
    deepspeed,
    gather,
    open_partitioning,
    partitioned_parameter,
    quietly,
    release,
    released,
)
from .deepspeed_config import EngineContext, engine_config
from .distributed import agreed, run_on_all_ranks

logger = logging.getLogger("align")

T = TypeVar("T")
# Keys of a user's file under which parameters are stored in a form that only DeepSpeed writes.
OWN_FORMS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")


def open_partitions(
    options: TrainOptions, world: World, found: EngineContext
) -> ZeroPartitions | None:
    """The partitions of ZeRO-3; None if DeepSpeed has to partition a whole model."""
    config = engine_config(options, found)
    if reason := _own_form(config["zero_optimization"]):
        if world.rank == 0:
            logger.info("The policy is loaded whole on every rank, then spread: %s.", reason)
        return None
    with quietly():
        return ZeroPartitions(open_partitioning(deepcopy(config)), world)


def _own_form(zero: dict[str, Any]) -> str:
    """The reason that the engine has to partition a whole model; empty if it need not."""
    if zero.get("offload_param", {}).get("device") == "nvme":
        return "offload_param keeps it on NVMe"
    return next((f"{name} packs it" for name in OWN_FORMS if zero.get(name)), "")


class ZeroPartitions:
    """The `Partitions` of ZeRO-3."""

    def __init__(self, init: Any, world: World) -> None:
        self._init = init
        self._world = world

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self._init.local_device
        return device

    def together(self, action: Callable[[], T]) -> T:
        """Runs an action on every rank; an AlignError of one rank is raised on all."""
        return run_on_all_ranks(self._world, action)

    def agreed(self, holds: bool, /) -> bool:
        """Whether something holds on every rank."""
        return agreed(self._world, holds)

    def parameter(
        self, like: Tensor, dtype: torch.dtype, fill: Callable[[Tensor, int], None]
    ) -> nn.Parameter:
        """A parameter of the shape of `like`, of which `fill` writes this rank's part."""
        return partitioned_parameter(self._init, like, dtype, fill)

    @contextmanager
    def in_calls(self, model: nn.Module) -> Iterator[None]:
        """Gathers a parameter inside when a call reads it, until that call ends."""
        with freeing_large_blocks(), _whole_in_calls(model):
            yield

    def changing(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Gathers these parameters inside; rank zero's changes are kept."""
        inside: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
            list(parameters), modifier_rank=0
        )
        return inside


M_MMAP_THRESHOLD = -3
SMALLEST, LARGEST = 1 << 20, 32 << 20  # blocks that glibc returns to the system when freed


@contextmanager
def freeing_large_blocks() -> Iterator[None]:
    """Makes glibc return freed parameters to the system, instead of fragmenting their memory.

    glibc raises its threshold with the first large block that is freed, so it ends at the largest.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if set_option is None:
        yield
        return
    set_option(M_MMAP_THRESHOLD, SMALLEST)
    try:
        yield
    finally:
        set_option(M_MMAP_THRESHOLD, LARGEST)


@contextmanager
def _whole_in_calls(model: nn.Module) -> Iterator[None]:
    calls: list[list[nn.Parameter]] = []  # the parameters gathered by each call on the stack
    ask = nn.Module.__getattr__

    def gathering(module: nn.Module, name: str) -> Any:
        found = ask(module, name)
        if calls and isinstance(found, nn.Parameter) and released([found]):
            gather([found])
            calls[-1].append(found)
        return found

    hooks: list[Any] = []
    for module in model.modules():
        begin = module.register_forward_pre_hook(lambda *_: calls.append([]))
        end = module.register_forward_hook(lambda *_: release(calls.pop()), always_call=True)
        hooks += [begin, end]
    try:
        # On every attribute access, because a module may read the weight of another one.
        nn.Module.__getattr__ = gathering  # type: ignore[method-assign]
        yield
    finally:
        nn.Module.__getattr__ = ask  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
