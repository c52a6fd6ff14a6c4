"""Saves checkpoints on all ranks, and checks the disk space for them."""

from __future__ import annotations

import logging
import time
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...schemas.checkpoint import Checkpoint, State
from ...schemas.errors import AlignError, StorageError, log_failure
from ...stages.engine.deepspeed_compat import whole_numel
from ...stages.engine.deepspeed_config import stage_of, states_of
from ...stages.engine.distributed import gathered, run_on_rank_zero
from ...stages.model.logprobs import causal_model
from ...stages.model.model_folder import model_tensors
from ...stages.storage.disk import fs
from ...stages.storage.run.checkpoints import (
    prune,
    read_checkpoint,
    replace_state,
    save_checkpoint,
)
from .resume import identity_of, made_with

if TYPE_CHECKING:
    from .setup import Run

logger = logging.getLogger("align")

# torchrun and deepspeed kill a process half a minute after asking it to stop.
SLOW_SECONDS = 20.0


def save_state(run: Run, state: State) -> str:
    """Saves a checkpoint on all ranks; returns the reason of a failure, the same on every rank."""
    world, began = run.world, time.monotonic()
    if lack := run_on_rank_zero(world, lambda: lack_of_space(run)):
        return lack
    record = Checkpoint(__version__, identity_of(run), made_with(run), run.changes, state)
    failure = save_checkpoint(
        run.folder,
        record,
        run.engine.save_state,
        run_id=run.run_id,
        rank=world.rank,
        gather=lambda mine: gathered(world, mine),
    )
    if not failure and world.rank == 0:
        _keep(run, state.step)
    took = time.monotonic() - began
    if world.rank == 0 and took > SLOW_SECONDS:
        logger.warning(
            "Saving took %.0f s, but launchers kill a run 30 s after asking it to stop. Save more "
            "often, or to a faster disk.",
            took,
        )
    return failure


def add_evaluation(run: Run, state: State) -> None:
    """Adds the evaluation of this step to its checkpoint, which was saved before."""
    if run.world.rank == 0:
        replace_state(run.folder, state)
        _keep(run, state.step)


def _keep(run: Run, step: int) -> None:
    """Removes old checkpoints and uploads the run, after a newer checkpoint was saved."""
    train = run.config.train
    with log_failure("Older checkpoints stay until the next one"):
        prune(run.folder, newest=step, keep_last=train.keep_last, best=train.best)
    if run.remote:
        with log_failure("The checkpoint is only on this machine until the next one"):
            run.remote.push()


def require_disk_space(run: Run) -> None:
    """Refuses a disk without space for one checkpoint and the model; warns if not all fit."""
    train, folder = run.config.train, run.folder
    checkpoint, model = checkpoint_bytes(run), model_bytes(run)
    free = fs.free_bytes(folder.root)
    if free < checkpoint + model:
        raise StorageError(
            f"{folder.root}: a checkpoint needs about {checkpoint:,} bytes and the model "
            f"{model:,}, but {free:,} are free. Free some space or choose another --output."
        )
    # A new checkpoint is complete before an old one is removed.
    kept = train.keep_last + bool(train.best) + 1
    missing = max(0, kept - len(folder.steps())) * checkpoint + model
    if free < missing:
        logger.warning(
            "%s: %d checkpoints (train.keep_last%s, and one that is being written) and the model "
            "need about %s more bytes, but %s are free. Lower train.keep_last, or free some space.",
            folder.root,
            kept,
            " and train.best" if train.best else "",
            f"{missing:,}",
            f"{free:,}",
        )


def lack_of_space(run: Run) -> str:
    """The reason that another checkpoint does not fit; empty if it fits."""
    needed, free = checkpoint_bytes(run), fs.free_bytes(run.folder.root)
    if free >= needed:
        return ""
    return f"{run.folder.checkpoints}: about {needed:,} bytes are needed, but {free:,} are free"


def require_space_for_model(run: Run) -> None:
    """Refuses to write a model that does not fit on the disk."""
    needed, free = model_bytes(run), fs.free_bytes(run.folder.root)
    if free < needed:
        raise StorageError(
            f"{run.folder.model}: about {needed:,} bytes are needed, but {free:,} are free. Free "
            "some space, then run the same command with --resume auto: the checkpoint is kept."
        )


def checkpoint_bytes(run: Run) -> int:
    """The size of the newest checkpoint, or an estimate before the first one."""
    for step in run.folder.steps()[::-1]:
        try:
            return sum(file.bytes for file in read_checkpoint(run.folder.step(step)).files)
        except AlignError:  # damaged: its size is unknown
            continue
    width, stage = _width(run), stage_of(run.engine_config)
    # Under ZeRO, and in 16 bits, there is also a 32-bit copy; under ZeRO-3 only that copy.
    weights = (width if stage < 3 else 0) + (4 if stage or width < 4 else 0)
    kind = run.engine_config.get("optimizer", {}).get("type", "")
    per_weight = weights + 4 * states_of(str(kind))
    return int(per_weight * sum(map(whole_numel, _learning(run))))


def model_bytes(run: Run) -> int:
    """The size of the saved model: the adapter, the whole policy, or both."""
    lora = run.config.lora
    stored = sum(prod(one.shape) for one in model_tensors(Path(run.begins_as.path)))
    whole = max(stored, sum(map(whole_numel, run.policy.parameters())))
    adapter = sum(map(whole_numel, _learning(run)))
    counts = (adapter if lora.enabled else 0) + (whole if lora.merge or not lora.enabled else 0)
    return _width(run) * counts


def _learning(run: Run) -> list[Any]:
    return [one for one in run.policy.parameters() if one.requires_grad]


def _width(run: Run) -> int:
    return int(causal_model(run.policy.model).dtype.itemsize)
