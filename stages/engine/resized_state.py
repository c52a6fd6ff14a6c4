"""Engine state, resized to another number of ranks or another ZeRO stage.

Each rank maps the files of all ranks that saved, and copies its new part out of them, one
parameter at a time. Nothing is converted on disk, and no rank has more than its own part in memory.
"""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...schemas.errors import UsageError
from .deepspeed_compat import STATE_TYPES, replace_optimizer_state, shapes_of_groups
from .partitions import (
    Partition,
    PartitionLayout,
    ScatteredValues,
    is_finite,
    require_length,
    split_each,
)

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
CLIPPING = "clip_grad"  # DeepSpeed goes on with the norm of the state, not with that of the run
SHARED = {"loss_scaler", "dynamic_loss_scale", "overflow"}  # every rank has the same
OF_STEP = {"lr", "params", "step"}  # what a group has anew at each step, or by its numbers
NUMBERS = {"betas", "eps", "weight_decay"}  # with which torch's optimizers compute
OF_KERNEL = {"capturable", "differentiable", "foreach", "fused"}  # how the same is computed
ADAM = ("exp_avg", "exp_avg_sq")
MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"), ADAM),
    "Lion": ADAM[:1],
}
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
    if odd := [name for name in COUNTERS if type(model[name]) is not int]:
        raise ValueError(f"{odd[0]} is not a whole number")
    if model["optimizer"] is not None:
        return SavedState(model, (model["optimizer"],))
    paths = {path.name.removeprefix("bf16_"): path for path in folder.glob("*_optim_states.pt")}
    names = (
        f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(model["dp_world_size"])
    )
    return SavedState(model, tuple(_mapped(paths[name])["optimizer_state_dict"] for name in names))


def _mapped(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        # Packed values could be any number of times as large as the file.
        if sum(one.file_size for one in archive.infolist()) > path.stat().st_size:
            raise ValueError(f"{path.name} holds more than its size")
    with torch.serialization.safe_globals(list(STATE_TYPES)):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def resize(saved: SavedState, engine: Any, order: Order, *, rank: int, ranks: int) -> ResizedState:
    """A state resized for a rank; ValueError if its parameters are not those of the engine."""
    stage, live = int(engine.zero_optimization_stage()), engine.optimizer.state_dict()
    old, new = _saved_layout(saved, order), _live_layout(engine, live, order, ranks)
    _require_same_making(saved, old, new, live, stage)
    values, scalars = _collected(saved, engine, old, order)
    shapes = {name: one.shape for name, one in engine.module.named_parameters()}
    flats = []
    for index, group in enumerate(new.groups):
        partition = new.partition(index, rank)
        flat = {key: values.fill(key, partition) for key in values.keys}
        for key, tensor in flat.items():
            _require_part(key, partition, tensor)
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


def require_fit(saved: SavedState, engine: Any, order: Order, *, rank: int, ranks: int) -> None:
    """ValueError unless a rank may load its part of a state of this stage and number of ranks.

    DeepSpeed repeats a tensor of one value, and fills one that is too short up with zeros. What
    every rank loads whole is looked at by one of them, tensor by tensor.
    """
    stage, live = int(engine.zero_optimization_stage()), engine.optimizer.state_dict()
    layout = _saved_layout(saved, order)
    _require_same_making(saved, layout, _live_layout(engine, live, order, saved.ranks), live, stage)
    _require_sound_weights(saved, engine, range(rank, len(saved.model["module"]), ranks))
    rank = rank if stage else 0
    for name in SHARED & live.keys():
        if type(saved.optimizers[rank].get(name)) is not type(live[name]):
            raise ValueError(f"{name} is missing, or is another's")
    if (norm := live.get(CLIPPING)) != (was := saved.optimizers[rank].get(CLIPPING, norm)):
        raise ValueError(f"gradients were clipped to {was!r:.40}, not {norm}")
    for index, weight in enumerate(saved.weights(rank, order)):
        partition = layout.partition(index, rank)
        _require_part(WEIGHT, partition, weight)
        for key, moment in _moments(saved, engine, rank, index).items():
            _require_part(key, partition, moment)


def _require_sound_weights(saved: SavedState, engine: Any, numbers: range) -> None:
    dtypes = {name: one.dtype for name, one in engine.module.named_parameters()}
    names = [*saved.model["module"]]
    for name in [names[number] for number in numbers if names[number] in dtypes]:
        kept = saved.model["module"][name]
        if kept.numel() * kept.element_size() > kept.untyped_storage().nbytes():
            raise ValueError(f"{name} has more values than are stored")
        if kept.dtype != dtypes[name] or not is_finite(kept):
            raise ValueError(f"{name} is of another dtype, or has values that are not finite")


def _moments(saved: SavedState, engine: Any, rank: int, index: int) -> dict[str, Tensor]:
    """What the engine's optimizer has to have kept for each value of a tensor, if that is known."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    names = MOMENTS.get(type(optimizer).__name__, ())
    state = saved.base(rank)["state"]
    has_stepped = saved.model["global_steps"] > saved.model["skipped_steps"]
    # Without ZeRO, a parameter that never had a gradient has none.
    if names and (index in state or (has_stepped and (saved.stage or not state))):
        known = state.get(index, {})
        if not 0 < known.get("step", 1) <= saved.model["global_steps"]:
            raise ValueError(f"the optimizer has taken {known['step']} steps")
        return {name: known[name] for name in names}
    return {}


def _require_part(key: str, partition: Partition, flat: Tensor) -> None:
    require_length(key, partition, flat)
    if not flat.is_floating_point():
        raise ValueError(f"{key} is of {flat.dtype}")
    for fragment in partition.fragments:  # padding may hold anything
        if not is_finite(flat.reshape(-1)[fragment.at :][: fragment.length]):
            raise ValueError(f"{key} has values of {fragment.name} that are not finite")


def _require_same_making(
    saved: SavedState,
    old: PartitionLayout,
    new: PartitionLayout,
    live: Mapping[str, Any],
    stage: int,
) -> None:
    """ValueError for parameters of other sizes, or numbers of the optimizer that are others."""
    if odd := sorted(set(old.sizes.items()) ^ set(new.sizes.items())):
        raise ValueError(f"{odd[0][0]} is missing from one of them, or has another size")
    groups = live.get(STATE_KEYS[stage][0], live)["param_groups"]
    for now, was in zip(groups, saved.base(0)["param_groups"], strict=True):
        for name in now.keys() & (was.keys() | NUMBERS) - OF_STEP - OF_KERNEL:
            if now[name] != was.get(name):
                told = f"{was[name]!r:.40}" if name in was else "missing"
                raise ValueError(f"{name} of the optimizer is {told}, not {now[name]}")


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
    saved: SavedState, engine: Any, layout: PartitionLayout, order: Order
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
            _moments(saved, engine, rank, index)
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
