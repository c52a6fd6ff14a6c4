"""DeepSpeed's measured memory on one rank for each ZeRO stage, in bytes.

For N trainable elements, L = N / ranks of them on a rank, and weights of b bytes:

    stage        weights   master   states   gradients    first        update
    0, float32   4 N       -        8 N      4 N          -            4 N
    0, 16 bits   b N       4 N      8 N      b N          -            (4 + b) N
    1, float32   4 N       4 L      8 L      4 N          -            4 N or 8 L
    1, bfloat16  b N       4 L      8 L      (4 + b) N    4 N          (4 + b) N
    2, float32   4 N       4 L      8 L      4 L + 4 L    4 L          8 L
    2, bfloat16  b N       4 L      8 L      4 L + b L    (4 + b) L    4 L
    3            b L       4 L      8 L      4 L          4 L          8 L

`first` adds to the activations of a step's first micro-batch, `gradients` to those of a later one,
and `update` to weights, master weights and states. The states are AdamW's. An update that is not
fused, as on a CPU, takes up to 8 L more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...schemas.train_options import TrainOptions
from .deepspeed_config import TYPES, offloads_optimizer, states_of

FLOAT, HALF = 4, 2  # bytes
MOST_GATHERED = 1_000_000_000  # elements: DeepSpeed's stage3_max_live_parameters
SUB_GROUP = 10**9  # elements that ZeRO-3 updates at once
CUBLAS = 32 << 20  # its workspace on a GPU


@dataclass(frozen=True)
class Elements:
    """Counts of elements of a policy's parameters."""

    trained: int
    frozen: int
    largest: int  # parameter that is trained
    packed: int = 0  # of the frozen ones, in 4 bits
    packed_bytes: int = 0

    @property
    def total(self) -> int:
        """The number of all elements."""
        return self.trained + self.frozen


def elements_of(model: nn.Module, numel: Callable[[Tensor], int] = Tensor.numel) -> Elements:
    """Counts each parameter once; 4-bit weights count by their original elements."""
    trained = [numel(one) for one in model.parameters() if one.requires_grad]
    frozen = sum(numel(one) for one in model.parameters() if not one.requires_grad)
    packed = packed_bytes = 0
    for one in model.parameters():
        if (state := getattr(one, "quant_state", None)) is not None:  # two elements per byte
            packed, packed_bytes = packed + math.prod(state.shape), packed_bytes + one.nbytes
            frozen += math.prod(state.shape) - one.numel()
    return Elements(sum(trained), frozen, max(trained, default=0), packed, packed_bytes)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one rank."""

    weights: int
    optimizer: int  # master weights and states
    gradients: int  # between two micro-batches
    first: int  # gradients before the first micro-batch of a step
    arriving: int  # added by the first gradient of any micro-batch
    arriving_first: int  # the same in the first micro-batch of a step
    update: int  # in an update, beside weights, optimizer and buffers
    buffers: int
    gathered: int  # weights that ZeRO-3 gathers for their use
    host: int  # in the memory of the CPU


def engine_memory(
    elements: Elements,
    config: Mapping[str, Any],
    train: TrainOptions,
    *,
    ranks: int,
    itemsize: int,
    device: str,
) -> EngineMemory:
    """The memory with a DeepSpeed configuration, for weights of `itemsize` bytes."""
    zero = config.get("zero_optimization", {})
    stage, is_half = int(zero.get("stage", 0)), itemsize < FLOAT
    is_on_host = offloads_optimizer(config)
    weights_on_host = (zero.get("offload_param") or {}).get("device", "none") != "none"
    all_of, part = elements.trained, -(-elements.trained // ranks)

    weights = itemsize * (all_of + elements.frozen - elements.packed) + elements.packed_bytes
    if stage == 3:
        weights = -(-weights // ranks)
    size = HALF if is_half and train.optimizer_dtype == "bfloat16" else FLOAT  # of a state
    master = size if stage or is_half else 0
    states = round(states_of(TYPES[train.optimizer]) * size)
    optimizer = (part if stage else all_of) * (master + states)

    first = arriving = arriving_first = 0
    flat, low, whole = size * part, itemsize * all_of, FLOAT * all_of
    unfused = 0 if device == "cuda" else 2 * flat  # intermediate results of an update
    if is_on_host:
        gradients, arriving = 0, 2 * itemsize * elements.largest
        arriving_first = update = arriving
    elif stage == 0 and is_half:
        gradients = low
        update = low + whole + (0 if device == "cuda" else 2 * FLOAT * elements.largest)
    elif stage == 0:
        gradients, update = low, low + (0 if device == "cuda" else whole)
    elif stage == 1 and is_half:
        first, gradients = whole, whole + low
        update = gradients + unfused
    elif stage == 1:
        gradients, update = whole, max(whole, 2 * flat, flat + unfused)
    elif stage == 2 and is_half:
        gradients, arriving = flat, itemsize * part
        arriving_first, update = flat + arriving, flat + unfused
    elif stage == 2:
        gradients = arriving = arriving_first = flat
        update = max(2 * flat, flat + unfused)
    else:  # one sub-group is updated after the other
        first = gradients = flat
        group = min(part, SUB_GROUP) * size
        update = flat + (group if device == "cuda" else 3 * group)

    bucket = int(zero.get("reduce_bucket_size", 0)) * (FLOAT if stage == 1 else itemsize)
    if not stage or (stage == 1 and is_half):
        bucket = 0
    is_sharded = stage == 3 and (ranks > 1 or weights_on_host)
    on_host = optimizer + FLOAT * part if is_on_host else 0
    return EngineMemory(
        weights=0 if weights_on_host else weights,
        optimizer=0 if is_on_host else optimizer,
        gradients=gradients,
        first=first,
        arriving=arriving,
        arriving_first=arriving_first,
        update=update,
        buffers=(CUBLAS if device == "cuda" else 0) + bucket,
        gathered=min(elements.total, MOST_GATHERED) * itemsize if is_sharded else 0,
        host=on_host + (weights if weights_on_host else 0),
    )
