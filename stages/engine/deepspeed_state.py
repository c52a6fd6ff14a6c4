"""Engine state on disk, loaded without executing pickles; the policy's weights on rank 0."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...schemas.batches import World
from ...schemas.errors import AlignError, CorruptionError, StorageError
from ...schemas.safe_text import masked
from .deepspeed_compat import STATE_TYPES, gathered_weight, quietly, state_written_by
from .distributed import run_on_all_ranks
from .resized_state import Order, ResizedState, put_into, read_state, require_fit, resize

TAG = "state"
CONFIG = "ds_config"
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def save(engine: Any, folder: Path) -> tuple[str, ...]:
    """Writes this rank's part; returns the files this rank wrote, relative to the folder."""
    with quietly(), _failing_late(engine) as written:
        # Frozen parameters are left out: the model folder has them.
        engine.save_checkpoint(
            str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=True
        )
    return tuple(sorted(str(path.relative_to(folder)) for path in written))


def load(engine: Any, folder: Path, world: World, order: Order) -> None:
    """Loads this rank's part of a state that was saved by any world size and ZeRO stage.

    `order` has the names of the trained parameters in the engine's order.
    """
    with _refusing(folder):
        saved = read_state(folder / TAG)
        # Without ZeRO every rank has all of it, for any number of ranks.
        is_same_size = saved.ranks == world.size or saved.stage == 0
        is_same = is_same_size and saved.stage == engine.zero_optimization_stage()
    if is_same:
        is_whole = all(parameter.requires_grad for parameter in engine.module.parameters())

        def fit() -> None:
            with _refusing(folder):
                require_fit(saved, engine, order)

        # All ranks have looked at theirs before one of them enters a collective.
        run_on_all_ranks(world, fit)
        with _refusing(folder), quietly(), _data_only():
            # Frozen parameters are not in the state.
            engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=is_whole)
        return

    def cut() -> ResizedState:
        with _refusing(folder):
            return resize(saved, engine, order, rank=world.rank, ranks=world.size)

    # All ranks have cut theirs before one of them enters a collective.
    resized = run_on_all_ranks(world, cut)
    with _refusing(folder), quietly():
        put_into(engine, resized)


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except AlignError:
        raise
    except Exception as error:  # torch's loader raises anything
        # Torch's own words would have it opened with all its code.
        is_pickle = isinstance(error, pickle.UnpicklingError)
        why = "it holds more than tensors" if is_pickle else _first_line(error)
        raise CorruptionError(
            f"{folder} does not fit the model and engine of this run ({why}). Use "
            "the model, optimizer and train.dtype that it was saved with."
        ) from error


@contextmanager
def _failing_late(engine: Any) -> Iterator[list[Path]]:
    """Delays a rank's write error until after the collectives that its peers wait in."""
    write, written, failures = engine.checkpoint_engine.save, [], []

    def save_or_note(state_dict: Any, path: str) -> None:
        written.append(Path(path))
        if CONFIG in state_dict:
            # DeepSpeed adds its configuration, which may hold keys of other services.
            state_dict = {**state_dict, CONFIG: masked(state_dict[CONFIG])}
        try:
            write(state_dict, path)
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            failures.append(error)

    with state_written_by(engine, save_or_note):
        yield written
    if failures:
        raise StorageError(
            f"{written[-1].parent}: cannot write the state ({_first_line(failures[0])})."
        )


@contextmanager
def _data_only() -> Iterator[None]:
    """Makes torch load tensors and a few types only, where DeepSpeed asks for whole pickles."""
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
    """Parameters, tied ones once, and saved buffers, on rank 0; a collective.

    Weights outside of the model keep the policy's names: `value_head.weight`.
    """
    weights = {}
    for name, tensor in _tensors(policy):
        if trainable_only and not tensor.requires_grad:
            continue
        # One at a time, so that no device ever holds the whole of a partitioned model.
        with gathered_weight(tensor):
            if rank == 0:
                weights[name.removeprefix(WRAPPED)] = tensor.detach().to("cpu", copy=True)
    return weights


def _tensors(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from policy.named_parameters()
    saved = policy.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in policy.named_buffers() if name in saved)
