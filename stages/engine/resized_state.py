"""Optimizer state, resharded for another number of ranks in the same ZeRO stage.

ZeRO 1 and 2 join the parameters of a group end to end and divide them into equal shards; ZeRO 3
divides each parameter. Each rank memory-maps the files of all saved ranks and copies its new shard
out of them: nothing is converted on disk, and no rank has more than its own shard in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...schemas.errors import UsageError
from .deepspeed_compat import shapes_of_groups

# The keys of torch's optimizer state and of the master weights, by ZeRO stage.
TOGETHER = ("base_optimizer_state", "single_partition_of_fp32_groups")
KEYS = {1: TOGETHER, 2: TOGETHER, 3: ("optimizer_state_dict", "fp32_flat_groups")}
# DeepSpeed pads a shard to a multiple of so many values.
ALIGNMENT = {1: 2, 2: 2, 3: 1}
SHARED = ("loss_scaler", "dynamic_loss_scale", "overflow")  # equal on every rank

# The parameters of each flat tensor: names and numbers of values.
Layout = Sequence[Mapping[str, int]]


def resized(
    engine: Any, model: Mapping[str, Any], saved: Sequence[Any], *, rank: int, ranks: int
) -> dict[str, Any]:
    """The optimizer's state for this rank, in the form that the engine's optimizer saves.

    `saved` has the state of each saved rank, and `model` is rank 0's state of the model.
    """
    stage, live = int(engine.zero_optimization_stage()), engine.optimizer.state_dict()
    base, master = KEYS[stage]
    states = [one[base]["state"] for one in saved]
    first = states[0].get(0, {})  # nothing before the first step
    is_packed = any(isinstance(value, dict) for value in first.values())
    if is_packed or engine.zero_round_robin_gradients():
        cause = (
            "train.optimizer=adamw8bit" if is_packed else "zero_optimization.round_robin_gradients"
        )
        raise UsageError(
            f"{cause} makes the layout of the optimizer's state depend on the number of ranks. "
            f"Resume on {len(saved)} ranks, as when it was saved."
        )
    cut = partial(
        cut_for,
        then=layout_of(stage, model["param_shapes"], saved[0]),
        now=layout_of(stage, shapes_of_groups(engine), live),
        alignment=ALIGNMENT[stage],
        rank=rank,
        ranks=ranks,
    )
    weights = cut([one[master] for one in saved])
    moments, scalars = {}, {}
    for key, value in first.items():
        if isinstance(value, Tensor) and value.ndim:
            moments[key] = cut([[one[group][key] for group in sorted(one)] for one in states])
        else:
            scalars[key] = value  # such as the number of steps
    groups = zip(live[base]["param_groups"], saved[0][base]["param_groups"], strict=True)
    of_torch = {
        "state": {
            index: {**copy.deepcopy(scalars), **{key: flat[index] for key, flat in moments.items()}}
            for index in range(len(weights) if first else 0)
        },
        "param_groups": [{**new, **old, "params": new["params"]} for new, old in groups],
    }
    shared = {name: saved[0][name] for name in SHARED if name in saved[0]}
    return {**live, **shared, base: of_torch, master: weights}


def layout_of(
    stage: int, shapes: Sequence[Mapping[str, torch.Size]], state: Mapping[str, Any]
) -> Layout:
    """The layout of parameters with these shapes, a dict per flat tensor."""
    sizes = [{name: shape.numel() for name, shape in group.items()} for group in shapes]
    if stage == 3:
        return sizes
    # The padding of DeepSpeed's `parameter_alignment` after each parameter.
    paddings = state.get("param_alignment_paddings") or [[0] for _ in sizes]
    return [
        {f"group {index}": sum(group.values()) + sum(padding)}
        for index, (group, padding) in enumerate(zip(sizes, paddings, strict=True))
    ]


def cut_for(
    flats: Sequence[Sequence[Tensor]],
    then: Layout,
    now: Layout,
    *,
    alignment: int,
    rank: int,
    ranks: int,
) -> list[Tensor]:
    """This rank's flat tensors, from those of all saved ranks; padding is zero.

    ZeRO 3 may divide the same parameters among another number of flat tensors.
    """
    stored: dict[str, list[Tensor]] = {}
    for index, layout in enumerate(then):
        start = 0
        for name, size in layout.items():
            length = part_length(size, len(flats), alignment)
            # The last shard may be stored without its padding.
            stored[name] = [one[index].view(-1)[start : start + length] for one in flats]
            start += length
    cut = []
    for layout in now:
        parts = []
        for name, size in layout.items():
            old = part_length(size, len(flats), alignment)
            new = part_length(size, ranks, alignment)
            low, high = min(rank * new, size), min((rank + 1) * new, size)
            part, found = torch.zeros(new, dtype=stored[name][0].dtype), 0
            for number, values in enumerate(stored[name]):
                begin = max(low, number * old)
                end = min(high, number * old + len(values))
                if begin < end:
                    part[begin - low : end - low] = values[
                        begin - number * old : end - number * old
                    ]
                    found += end - begin
            if found < high - low:
                raise ValueError(f"{name} lacks {high - low - found:,} of its values")
            parts.append(part)
        cut.append(torch.cat(parts))
    return cut


def part_length(size: int, ranks: int, alignment: int) -> int:
    """The length of each of the equal shards of so many values, with padding."""
    return -(-size // (alignment * ranks)) * alignment
