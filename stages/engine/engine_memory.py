"""DeepSpeed's memory on one rank for each ZeRO stage, in bytes, as it was measured.

For N trainable elements, L = N / ranks of them on a rank, and weights of b bytes:

    stage                    weights   master    states       gradients between micro-batches
    0, float32               4 N       -         8 N          4 N
    0, 16 bits               b N       4 N       8 N          b N
    1, float32               4 N       4 L       8 L          4 N
    1, bfloat16              b N       4 L       8 L          b N, and 4 N that are never freed
    2                        b N       4 L       8 L          4 L
    3                        b L       4 L       8 L          4 L that are never freed

The states are those of AdamW. An update takes more temporarily: flat copies of gradients, and
the intermediate results of an optimizer that is not fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...schemas.train_options import TrainOptions
from .optimizers import TYPES, offloads_optimizer, states_of

FLOAT, HALF = 4, 2  # bytes
MOST_GATHERED = 1_000_000_000  # elements: DeepSpeed's stage3_max_live_parameters
SUB_GROUP = 10**9  # elements that ZeRO-3 updates at once
CUBLAS = 32 << 20  # its workspace on a GPU


@dataclass(frozen=True)
class Elements:
    """Counts of elements of a policy's parameters."""

    learning: int
    frozen: int
    largest: int  # parameter that is trained
    packed: int = 0  # of the frozen ones, in 4 bits
    packed_bytes: int = 0

    @property
    def total(self) -> int:
        """The number of all elements."""
        return self.learning + self.frozen


@dataclass(frozen=True)
class Setting:
    """The settings that decide how much memory is used."""

    stage: int
    ranks: int
    itemsize: int  # of the weights
    device: str  # cpu or cuda
    bucket: int  # elements
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    state_floats: float = 2.0  # float32 numbers of an optimizer per element
    master_bytes: int = FLOAT  # of a master weight and of each of those numbers

    @property
    def is_half(self) -> bool:
        """Whether weights are in 16 bits."""
        return self.itemsize < FLOAT

    @staticmethod
    def of(config: Mapping[str, Any], *, ranks: int, itemsize: int, device: str) -> Setting:
        """The setting of a DeepSpeed configuration."""
        zero = config.get("zero_optimization", {})
        weights = (zero.get("offload_param") or {}).get("device", "none") != "none"
        return Setting(
            stage=int(zero.get("stage", 0)),
            ranks=ranks,
            itemsize=itemsize,
            device=device,
            bucket=int(zero.get("reduce_bucket_size", 0)),
            offloads_optimizer=offloads_optimizer(config),
            offloads_weights=weights,
        )

    def with_optimizer(self, train: TrainOptions) -> Setting:
        """The setting with the states of the options' optimizer."""
        is_short = self.is_half and train.optimizer_dtype == "bfloat16"
        size = HALF if is_short else FLOAT
        return replace(self, state_floats=states_of(TYPES[train.optimizer]), master_bytes=size)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one rank."""

    weights: int
    optimizer: int  # master weights and states
    first: int  # gradients before the first micro-batch of a step
    later: int  # gradients before another one, and before the update
    per_finished: int  # for each finished element in the first micro-batch
    at_gradient: int  # from the first finished gradient of a micro-batch on
    at_first_gradient: int  # the same, in the first micro-batch of a step only
    buffers: int
    update: int  # in an update, besides weights and optimizer
    host: int  # in the memory of the CPU


def engine_memory(elements: Elements, setting: Setting) -> EngineMemory:
    """The memory of a setting; weights that are gathered for their use count as buffers."""
    learning, own = elements.learning, -(-elements.learning // setting.ranks)
    master = setting.master_bytes if setting.stage or setting.is_half else 0
    states = round(setting.state_floats * setting.master_bytes)
    updated = own if setting.stage else learning
    optimizer = updated * (master + states)
    weights = _weights(elements, setting)
    on_host = (optimizer + FLOAT * own if setting.offloads_optimizer else 0) + (
        weights if setting.offloads_weights else 0
    )
    gradients = _gradients(elements, setting)
    return EngineMemory(
        weights=0 if setting.offloads_weights else weights,
        optimizer=0 if setting.offloads_optimizer else optimizer,
        buffers=_buffers(elements, setting),
        host=on_host,
        **gradients,
    )


def _weights(elements: Elements, setting: Setting) -> int:
    plain = elements.frozen - elements.packed
    size = setting.itemsize * (elements.learning + plain) + elements.packed_bytes
    return -(-size // setting.ranks) if setting.stage == 3 else size


def _buffers(elements: Elements, setting: Setting) -> int:
    """Bytes of gradient buckets in flight, and of weights that are gathered for their use."""
    workspace = CUBLAS if setting.device == "cuda" else 0
    if not setting.stage:
        return workspace
    bucket = setting.bucket * (FLOAT if setting.stage == 1 else setting.itemsize)
    if setting.stage == 1 and setting.is_half:
        bucket = 0
    is_spread = setting.ranks > 1 or setting.offloads_weights
    gathered = min(elements.total, MOST_GATHERED) if setting.stage == 3 and is_spread else 0
    return workspace + bucket + gathered * setting.itemsize


def _gradients(elements: Elements, setting: Setting) -> dict[str, int]:
    learning, own, size = (
        elements.learning,
        -(-elements.learning // setting.ranks),
        setting.itemsize,
    )
    names = ("first", "later", "per_finished", "at_gradient", "at_first_gradient", "update")
    fused = setting.device == "cuda"
    moments = 0 if fused else 2 * setting.master_bytes * own
    flat = setting.master_bytes * own
    if setting.offloads_optimizer:
        values = (0, 0, 0, 2 * size * elements.largest, 0, 2 * size * elements.largest)
    elif setting.stage == 0:
        moments = 0 if fused else 2 * FLOAT * elements.largest
        whole = FLOAT * learning if setting.is_half else 0
        values = (0, size * learning, size, 0, 0, size * learning + whole + moments)
    elif setting.stage == 1 and setting.is_half:
        whole, low = FLOAT * learning, size * learning
        values = (whole, whole + low, size, 0, 0, whole + low + moments)
    elif setting.stage == 1:
        update = max(FLOAT * learning, 2 * flat, flat + moments)
        values = (0, FLOAT * learning, FLOAT, 0, 0, update)
    elif setting.stage == 2 and setting.is_half:
        values = (0, flat, 0, size * own, flat, flat + moments)
    elif setting.stage == 2:
        values = (0, flat, 0, flat, 0, max(2 * flat, flat + moments))
    else:  # updated one sub-group after the other
        part = min(own, SUB_GROUP) * setting.master_bytes
        values = (flat, flat, 0, 0, 0, flat + (part if fused else 3 * part))
    return dict(zip(names, values, strict=True))
