"""Whether a run may go on from what its folder holds."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from ..schemas.errors import FingerprintError, UsageError
from ..schemas.safe_text import masked
from ..stages.engine.user_file import leaves
from ..stages.storage import fs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..schemas.checkpoint import Position
    from ..schemas.engine import World
    from ..stages.storage.run_folder import RunFolder
    from .training_job import TrainingJob

logger = logging.getLogger("align")

# What may change between two parts of a run without changing what is learned.
FREE = {
    "train.cache",  # its root is compared instead
    "train.output",
    "train.resume",
    "train.max_time",
    "train.tokens_per_batch",
    "train.eval_every",
    "train.eval_table",
    "train.eval_text",
    "train.limit_eval_batches",
    "train.log_every",
    "train.save_every",
    "train.keep_last",
    "train.best",
    "train.nonfinite_limit",
    "lora.merge",
}
# What may change, but makes the whole another run than one that was never stopped.
LENGTH = {"train.epochs", "train.max_steps"}
SECTIONS = ("train", "lora", "method")


def require_same_run(begun: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Refuses settings that would make another run of it; whether its length was changed."""
    names = {name for name in {*begun, *now} if name.partition(".")[0] in SECTIONS}
    changed = sorted(name for name in names - FREE if begun.get(name) != now.get(name))
    lines = {
        name: f"{name}: begun with {_shown(begun, name)}, now {_shown(now, name)}"
        for name in changed
    }
    if binding := [lines[name] for name in changed if name not in LENGTH]:
        listed = "\n  ".join(binding)
        raise FingerprintError(
            f"This run was begun with other settings. What differs:\n  {listed}\n"
            "Undo the change, or begin a new run in another --output."
        )
    for name in changed:
        logger.warning("%s; the learning rate follows the new length from here on.", lines[name])
    return bool(changed)


def require_same_engine(folder: RunFolder, config: dict[str, Any]) -> None:
    """Refuses to go on under another DeepSpeed configuration, whatever its file is called."""
    if not (folder.steps() and folder.engine.exists()):
        return
    stored = json.loads(fs.read_bytes(folder.engine))
    begun, now = dict(leaves(stored)), dict(leaves(json.loads(json.dumps(masked(config)))))
    if changed := sorted(name for name in {*begun, *now} if begun.get(name) != now.get(name)):
        lines = [f"{name}: begun with {begun.get(name)}, now {now.get(name)}" for name in changed]
        listed = "\n  ".join(lines)
        raise FingerprintError(
            f"This run was begun with another DeepSpeed configuration. What differs:\n  {listed}\n"
            "Undo the change, or begin a new run in another --output."
        )


def _shown(settings: Mapping[str, Any], name: str) -> str:
    """Options of a method are written down only where they are given."""
    return repr(settings[name]) if name in settings else "its default"


def require_same_world(position: Position, job: TrainingJob, world: World) -> None:
    """Refuses a checkpoint that another cache, or other ranks, made."""
    if position.cache_root != job.manifest.root:
        raise FingerprintError(
            f"The run was begun on the cache {position.cache_root[:12]}…, and this one is "
            f"{job.manifest.root[:12]}…. Pass the --cache it was begun with, or begin a new run."
        )
    zero_stage = job.zero_stage(world.size)
    if (position.world_size, position.zero_stage) != (world.size, zero_stage):
        raise UsageError(
            f"The checkpoint of step {position.global_step} was saved by {position.world_size} "
            f"rank(s) under ZeRO {position.zero_stage}; this is {world.size} under ZeRO "
            f"{zero_stage}. Go on with as many ranks and the same stage."
        )
