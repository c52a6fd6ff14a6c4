"""Engine state, resized to another number of ranks or another ZeRO stage.

Each rank maps the files of all ranks that saved, and copies its new part out of them, one
parameter at a time. Nothing is converted on disk, and no rank has more than its own part in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...schemas.errors import UsageError
from .deepspeed_compat import STATE_TYPES, replace_optimizer_state, shapes_of_groups
from .partitions import PartitionLayout, ScatteredValues, split_each

Order = Sequence[Sequence[str]]  # names of the trained parameters, group by group

WEIGHT = "weight"  # the master weight: in 32 bits, also where the model has 16
# By stage, the keys of the state of torch's optimizer and of the master weights.
TOGETHER = ("base_optimizer_state", "single_partition_of_fp32_groups")
STATE_KEYS = {
    0: ("optimizer_state_dict", "fp32_groups"),
    1: TOGETHER,
    2: TOGETHER,
    3: ("optimizer_state_dict", "fp32_flat_groups"),
}
PADDINGS = "param_alignment_paddings"
SHARED = {"loss_scaler", "dynamic_loss_scale", "overflow"}  # every rank has the same
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class SavedState:
    """The files of a saved state, mapped: values are read when they are copied."""

    model: Mapping[str, Any]  # of rank 0: names, counters, buffers; under ZeRO-3 no weights
    optimizers: tuple[Any, ...]  # one per rank; without ZeRO one for all

    @property
    def ranks(self) -> int:
        """The number of ranks that saved it."""
        return int(self.model["dp_world_size"])

    @property
    def stage(self) -> int:
        """The ZeRO stage that it was saved under."""
        if self.model["optimizer"] is not None:
            return 0
        return int(self.optimizers[0].get("zero_stage", 1))  # bfloat16 does not say under ZeRO 1

    def base(self, rank: int) -> Mapping[str, Any]:
        """The state of torch's optimizer on a rank."""
        optimizer: Mapping[str, Any] = self.optimizers[rank]
        found: Mapping[str, Any] = optimizer.get(STATE_KEYS[self.stage][0], optimizer)
        return found

    def weights(self, rank: int, order: Order) -> list[Tensor]:
        """The master weights of a rank, flat tensor by flat tensor."""
        found = self.optimizers[rank].get(STATE_KEYS[self.stage][1])
        if self.stage:
            return list(found)
        if found is None:  # in 32 bits they are the model's own
            return [self.model["module"][name] for group in order for name in group]
        return [tensor for group in found for tensor in group]


@dataclass(frozen=True)
class ResizedState:
    """A saved state, resized for one rank of an engine."""

    saved: SavedState
    values: ScatteredValues
    layout: PartitionLayout  # of the engine
    optimizer: dict[str, Any]  # as the engine's optimizer would have saved it


def read_state(folder: Path) -> SavedState:
    """The mapped files of a state, which may hold tensors and `STATE_TYPES` only."""
    model = _mapped(min(folder.glob("*mp_rank_00_model_states.pt")))
    if model["optimizer"] is not None:
        return SavedState(model, (model["optimizer"],))
    paths = {path.name.removeprefix("bf16_"): path for path in folder.glob("*_optim_states.pt")}
    names = (
        f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(model["dp_world_size"])
    )
    return SavedState(model, tuple(_mapped(paths[name])["optimizer_state_dict"] for name in names))


def _mapped(path: Path) -> Any:
    with torch.serialization.safe_globals(list(STATE_TYPES)):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def resize(saved: SavedState, engine: Any, order: Order, *, rank: int, ranks: int) -> ResizedState:
    """A state resized for a rank; ValueError if its parameters are not those of the engine."""
    stage, live = int(engine.zero_optimization_stage()), engine.optimizer.state_dict()
    old, new = _saved_layout(saved, order), _live_layout(engine, live, order, ranks)
    _require_same_sizes(old, new)
    values, scalars = _collected(saved, old, order)
    shapes = {name: one.shape for name, one in engine.module.named_parameters()}
    flats = []
    for index, group in enumerate(new.groups):
        partition = new.partition(index, rank)
        flat = {key: values.fill(key, partition) for key in values.keys}
        if stage == 0:
            flat = {key: tensor.view(shapes[min(group)]) for key, tensor in flat.items()}
        flats.append(flat)
    return ResizedState(saved, values, new, _optimizer_state(saved, live, stage, scalars, flats))


def put_into(engine: Any, resized: ResizedState) -> None:
    """Loads a resized state into its engine; a collective."""
    if engine.zero_optimization_stage() < 3:  # there the weights follow the optimizer's
        parameters = dict(engine.module.named_parameters())
        for name, size in resized.layout.sizes.items():
            whole = resized.values.fill(WEIGHT, split_each({name: size}, 0, ranks=1))
            parameters[name].data.copy_(whole.view_as(parameters[name]))
    model, buffers = resized.saved.model, dict(engine.module.named_buffers())
    for name in model["buffer_names"]:
        buffers[name].copy_(model["module"][name])
    replace_optimizer_state(engine, resized.optimizer)
    for name in COUNTERS:
        setattr(engine, name, model[name])


def require_fit(saved: SavedState, engine: Any, order: Order) -> None:
    """ValueError unless a state of this stage and number of ranks is of the engine's parameters."""
    live = engine.optimizer.state_dict()
    _require_same_sizes(_saved_layout(saved, order), _live_layout(engine, live, order, saved.ranks))


def _require_same_sizes(old: PartitionLayout, new: PartitionLayout) -> None:
    if odd := sorted(set(old.sizes.items()) ^ set(new.sizes.items())):
        raise ValueError(f"{odd[0][0]} is missing from one of them, or has another size")


def _saved_layout(saved: SavedState, order: Order) -> PartitionLayout:
    if saved.stage == 0:
        names = [name for group in order for name in group]
        each = zip(names, saved.weights(0, order), strict=True)
        return PartitionLayout(0, 1, tuple({name: weight.numel()} for name, weight in each))
    groups = tuple(map(_numels, saved.model["param_shapes"]))
    return PartitionLayout(
        saved.stage, saved.ranks, groups, tuple(saved.optimizers[0].get(PADDINGS, ()))
    )


def _live_layout(engine: Any, live: Mapping[str, Any], order: Order, ranks: int) -> PartitionLayout:
    stage = int(engine.zero_optimization_stage())
    if stage == 0:
        sizes = {name: one.numel() for name, one in engine.module.named_parameters()}
        return PartitionLayout(
            0, 1, tuple({name: sizes[name]} for group in order for name in group)
        )
    groups = tuple(map(_numels, shapes_of_groups(engine)))
    return PartitionLayout(stage, ranks, groups, tuple(live.get(PADDINGS, ())))


def _numels(shapes: Mapping[str, torch.Size]) -> dict[str, int]:
    return {name: shape.numel() for name, shape in shapes.items()}


def _collected(
    saved: SavedState, layout: PartitionLayout, order: Order
) -> tuple[ScatteredValues, dict[str, Any]]:
    """Views of all values by key and parameter, and the scalars, such as the step.

    Without ZeRO, torch's optimizer keeps nothing for a parameter that never had a gradient, and
    counts its steps by themselves; with ZeRO it holds zeros and the steps of all.
    """
    values, scalars = ScatteredValues(), dict[str, Any]()
    for rank in range(len(saved.optimizers)):
        state = saved.base(rank)["state"]
        for index, weight in enumerate(saved.weights(rank, order)):
            partition = layout.partition(index, rank)
            values.add(WEIGHT, partition, weight)
            for key, value in state.get(index, {}).items():
                if isinstance(value, dict):
                    raise UsageError(
                        "The moments of this state are packed in blocks, as each rank held them. "
                        f"Resume as it was saved: ranks: {saved.ranks}, ZeRO stage: {saved.stage}."
                    )
                if isinstance(value, Tensor) and value.ndim:
                    values.add(key, partition, value)
                elif key not in scalars or value > scalars[key]:
                    scalars[key] = value
    return values, scalars


def _optimizer_state(
    saved: SavedState,
    live: Mapping[str, Any],
    stage: int,
    scalars: Mapping[str, Any],
    flats: list[dict[str, Tensor]],
) -> dict[str, Any]:
    """The state that the engine's optimizer would have saved with these flat tensors."""
    base_key, weights_key = STATE_KEYS[stage]
    now, was = live.get(base_key, live)["param_groups"], saved.base(0)["param_groups"]
    base = {
        "state": {
            index: {**copy.deepcopy(dict(scalars)), **_without_weight(flat)}
            for index, flat in enumerate(flats)
        },
        "param_groups": [
            {**new, **old, "params": new["params"]} for new, old in zip(now, was, strict=True)
        ],
    }
    if base_key not in live:  # in 32 bits without ZeRO the weights are the model's
        return base
    weights: Any = [flat[WEIGHT] for flat in flats]
    if stage == 0:
        each = iter(weights)
        weights = [[next(each) for _ in group["params"]] for group in now]
    carried = {name: saved.optimizers[0].get(name, live[name]) for name in SHARED & live.keys()}
    return {**live, **carried, base_key: base, weights_key: weights}


def _without_weight(flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in flat.items() if key != WEIGHT}
