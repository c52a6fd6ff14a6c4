"""Saves and loads engine state without executing pickles; collects weights on rank 0."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...schemas.batches import World
from ...schemas.errors import AlignError, CorruptionError, StorageError
from ...schemas.safe_text import masked
from .deepspeed_compat import (
    STATE_TYPES,
    gathered_weight,
    quietly,
    replace_optimizer_state,
    shapes_of_groups,
    state_written_by,
)
from .distributed import run_on_all_ranks

TAG = "state"
CONFIG = "ds_config"
MODULE = "module"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def save(engine: Any, folder: Path) -> tuple[str, ...]:
    """Writes this rank's part; returns the files this rank wrote, relative to the folder."""
    with quietly(), _failing_late(engine) as written:
        # Frozen parameters are left out: the model folder has them.
        engine.save_checkpoint(
            str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=True
        )
    return tuple(sorted(str(path.relative_to(folder)) for path in written))


def load(engine: Any, folder: Path, world: World) -> None:
    """Loads this rank's part of a state that any number of ranks saved in the same ZeRO stage."""
    stage = int(engine.zero_optimization_stage())

    def read() -> tuple[Mapping[str, Any], dict[str, Any] | None]:
        """Rank 0's state of the model, and the optimizer's state if it must be resharded."""
        with _refusing(folder):
            model = _mapped(min((folder / TAG).glob("*mp_rank_00_model_states.pt")))
            _require_same_parameters(model, engine)
            ranks = int(model["dp_world_size"])
            if stage == 0:  # every rank has the full state
                return model, None
            paths = {
                one.name.removeprefix("bf16_"): one for one in (folder / TAG).glob("*_optim_*")
            }
            names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]
            saved = [_mapped(paths[name])["optimizer_state_dict"] for name in names]
            if ranks == world.size:
                return model, None
            from .resized_state import resized  # noqa: PLC0415 - few runs need it

            return model, resized(engine, model, saved, rank=world.rank, ranks=world.size)

    # All ranks have read their parts before one of them enters a collective call.
    model, optimizer = run_on_all_ranks(world, read)
    with _refusing(folder), quietly(), _data_only():
        if optimizer is None:
            is_whole = all(parameter.requires_grad for parameter in engine.module.parameters())
            # Frozen parameters are not in the state.
            engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=is_whole)
            return
        stored = model[MODULE]
        if stage == 3:  # the optimizer's state has the weights
            stored = {name: stored[name] for name in model["buffer_names"]}
        engine.module.load_state_dict(stored, strict=False)
        replace_optimizer_state(engine, optimizer)
        for name in COUNTERS:
            setattr(engine, name, model[name])


def _mapped(path: Path) -> Any:
    """A file's content, memory-mapped."""
    with torch.serialization.safe_globals(list(STATE_TYPES)):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _require_same_parameters(model: Mapping[str, Any], engine: Any) -> None:
    """ValueError unless the saved trained parameters are the engine's, in its order."""
    if engine.zero_optimization_stage():
        live, stored = (
            [(name, tuple(shape)) for group in groups for name, shape in group.items()]
            for groups in (shapes_of_groups(engine), model["param_shapes"])
        )
    else:
        named = dict(engine.module.named_parameters())
        live = [(name, tuple(one.shape)) for name, one in named.items() if one.requires_grad]
        # The state also has buffers, and other names of tied weights.
        others = {*model["buffer_names"], *engine.module.state_dict()} - named.keys()
        tensors = model[MODULE].items()
        stored = [(name, tuple(one.shape)) for name, one in tensors if name not in others]
    for here, there in zip_longest(live, stored):
        if here != there:
            raise ValueError(f"the model trains {here} where the state has {there}")


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except AlignError:
        raise
    except Exception as error:  # torch's loader raises anything
        # Torch's own message recommends loading the file with code execution.
        is_pickle = isinstance(error, pickle.UnpicklingError)
        why = "it holds more than tensors" if is_pickle else _first_line(error)
        raise CorruptionError(
            f"{folder} does not fit the model and engine of this run ({why}). Use "
            "the model, optimizer and train.dtype with which it was saved."
        ) from error


@contextmanager
def _failing_late(engine: Any) -> Iterator[list[Path]]:
    """Delays a rank's write error until after the collective calls in which its peers wait."""
    write, written, failures = engine.checkpoint_engine.save, [], []
    module = engine.module
    weights = module.named_parameters(remove_duplicate=False)
    saved = {name for name, one in weights if one.requires_grad}
    saved |= {name for name, _ in module.named_buffers(remove_duplicate=False)}

    def save_or_note(state_dict: Any, path: str) -> None:
        written.append(Path(path))
        # DeepSpeed leaves out a frozen weight by its first name only, so a tied one stays.
        for name in state_dict.get(MODULE, {}).keys() - saved:
            del state_dict[MODULE][name]
        if CONFIG in state_dict:
            # DeepSpeed adds its configuration, which may contain secrets of other services.
            state_dict = {**state_dict, CONFIG: masked(state_dict[CONFIG])}
        try:
            write(state_dict, path)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
            failures.append(error)

    with state_written_by(engine, save_or_note):
        yield written
    if failures:
        raise StorageError(
            f"{written[-1].parent}: the checkpoint cannot be written ({_first_line(failures[0])})."
        )


@contextmanager
def _data_only() -> Iterator[None]:
    """Makes torch load only tensors and a few types, although DeepSpeed asks for full pickles."""
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(list(STATE_TYPES)):
            yield
    finally:
        if before is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = before


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


WRAPPED = "model."  # prefix of the model's names in the policy


def whole_weights(policy: nn.Module, *, rank: int, trainable_only: bool) -> Mapping[str, Tensor]:
    """Parameters, tied ones once, and saved buffers, on rank 0; a collective call.

    Weights outside of the model keep the policy's names: `value_head.weight`.
    """
    weights = {}
    for name, tensor in _tensors(policy):
        if trainable_only and not tensor.requires_grad:
            continue
        # One at a time, so that no device ever holds all of a sharded model.
        with gathered_weight(tensor):
            if rank == 0:
                weights[name.removeprefix(WRAPPED)] = tensor.detach().to("cpu", copy=True)
    return weights


def _tensors(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from policy.named_parameters()
    saved = policy.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in policy.named_buffers() if name in saved)


AT_ONCE = 1 << 24  # values


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite, in chunks because torch makes a copy for this check."""
    flat = values.reshape(-1)
    starts = range(0, flat.numel(), AT_ONCE)
    return all(bool(flat[at : at + AT_ONCE].isfinite().all()) for at in starts)
