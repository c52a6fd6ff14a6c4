"""Whether the disk has room for checkpoints and the model, before hours are spent on them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..schemas.errors import AlignError, StorageError
from ..stages.engine.deepspeed_config import stage_of
from ..stages.model.logprobs import causal_model
from ..stages.storage import fs
from ..stages.storage.checkpoints import read_checkpoint

if TYPE_CHECKING:
    from ..stages.storage.run_folder import RunFolder
    from .session import Session

logger = logging.getLogger("align")

BYTES_OF_MOMENTS = {"adam": 8, "adamw": 8, "lion": 4, "sgd": 0}


def require_room(session: Session, folder: RunFolder) -> None:
    """Refuses to begin where not even one checkpoint and the model fit; warns where not all do."""
    train = session.job.config.train
    checkpoint, model = checkpoint_bytes(session, folder), model_bytes(session)
    free = fs.free_bytes(folder.root)
    if free < checkpoint + model:
        raise StorageError(
            f"{folder.root}: a checkpoint needs about {checkpoint:,} bytes and the model "
            f"{model:,}, and {free:,} are free. Free some space or choose another --output."
        )
    # A new one is whole before an old one is removed.
    kept = train.keep_last + bool(train.best) + 1
    missing = max(0, kept - len(folder.steps())) * checkpoint + model
    if free < missing:
        logger.warning(
            "%s: %d checkpoints (train.keep_last%s, and one that is being written) and the model "
            "need about %s bytes more, and %s are free. Lower train.keep_last, or free some space.",
            folder.root,
            kept,
            " and train.best" if train.best else "",
            f"{missing:,}",
            f"{free:,}",
        )


def lack_of_room(session: Session, folder: RunFolder) -> str:
    """Why there is no room for one more checkpoint; empty where there is."""
    needed, free = checkpoint_bytes(session, folder), fs.free_bytes(folder.root)
    if free >= needed:
        return ""
    return f"{folder.checkpoints}: about {needed:,} bytes are needed, and {free:,} are free"


def require_room_for_model(session: Session, folder: RunFolder) -> None:
    """Refuses to write a model of which only a part would fit."""
    needed, free = model_bytes(session), fs.free_bytes(folder.root)
    if free < needed:
        raise StorageError(
            f"{folder.model}: about {needed:,} bytes are needed, and {free:,} are free. Free some "
            "space, then run the same command with --resume auto: the checkpoint is kept."
        )


def checkpoint_bytes(session: Session, folder: RunFolder) -> int:
    """As many as the newest one has; before the first, what the weights and the optimizer need."""
    for step in folder.steps()[::-1]:
        try:
            return sum(file.bytes for file in read_checkpoint(folder.step(step)).files)
        except AlignError:  # a damaged one tells nothing
            continue
    optimizer = session.engine_config.get("optimizer", {})
    moments = BYTES_OF_MOMENTS.get(str(optimizer.get("type", "")).lower(), 0)
    width, stage = _width(session), stage_of(session.engine_config)
    # Under ZeRO, and in 16 bits, there is a copy in 32; under ZeRO-3 there is no other.
    weights = (width if stage < 3 else 0) + (4 if stage or width < 4 else 0)
    per_weight = weights + moments
    return per_weight * sum(map(_numel, _learning(session)))


def model_bytes(session: Session) -> int:
    """Of what is saved in the end: the adapter, the whole policy, or both."""
    lora, width = session.job.config.lora, _width(session)
    whole = sum(map(_numel, session.policy.parameters()))
    adapter = sum(map(_numel, _learning(session)))
    counts = (adapter if lora.enabled else 0) + (whole if lora.merge or not lora.enabled else 0)
    return width * counts


def _learning(session: Session) -> list[Any]:
    return [one for one in session.policy.parameters() if one.requires_grad]


def _numel(parameter: Any) -> int:
    """Under ZeRO-3 a rank holds a part, and the parameter knows how large it is."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _width(session: Session) -> int:
    return int(causal_model(session.policy.model).dtype.itemsize)
