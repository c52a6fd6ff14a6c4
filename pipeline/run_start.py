"""The first moments of a run: its folder, its owner, and the checkpoint it goes on from."""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..stages.engine.distributed import from_first, together
from ..stages.storage import fs
from ..stages.storage.checkpoints import choose_checkpoint
from ..stages.storage.locks import owner_lock
from ..stages.storage.run_folder import RunFolder, forget_ending, read_ending
from .resuming import (
    engine_text,
    require_same_computing,
    require_same_engine_file,
    require_same_run,
    require_same_settings,
    require_whole_records,
)
from .run_identity import run_settings, signed_settings
from .settings import as_absolute

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..schemas.batches import World
    from ..schemas.checkpoint import Checkpoint
    from .session import Session
    from .training_job import TrainingJob


logger = logging.getLogger("align")


@dataclass(frozen=True)
class Start:
    """What every rank knows of the run's folder when it begins."""

    folder: RunFolder
    run_id: str
    checkpoint: Checkpoint | None = None
    is_finished: bool = False  # nothing is left to do, and nothing was touched
    changes: tuple[str, ...] = ()  # what is not as it was when the run began
    began: float = 0.0  # on this rank's monotonic clock

    @property
    def checkpoint_step(self) -> int:
        """Optimizer steps done before this run; 0 where it begins at the beginning."""
        return self.checkpoint.position.global_step if self.checkpoint else 0


@contextmanager
def started(job: TrainingJob, world: World) -> Iterator[Start]:
    """Owns the run's folder as long as the block runs; the first rank does it for all."""
    folder = RunFolder(Path(job.config.train.output))
    began = time.monotonic()  # each machine counts from a moment of its own
    with ExitStack() as held:
        start = from_first(world, lambda: _enter(job, world, folder, held))
        yield replace(start, began=began)


def held_to_checkpoint(session: Session, start: Start) -> Start:
    """Refuses to go on with another policy or engine; then writes down what the run is given."""
    world, folder = session.world, start.folder
    text = engine_text(session.engine_config)
    changes = start.changes
    if start.checkpoint:
        position = start.checkpoint.position
        changes += together(world, lambda: require_same_computing(position, session))

    def begin() -> None:
        if start.checkpoint:
            require_same_engine_file(folder, text)
        forget_ending(folder)
        fs.publish(folder.config, signed_settings(session.job.config), label="config")
        fs.publish(folder.engine, text, label="config")

    from_first(world, begin)
    return replace(start, changes=changes)


def _enter(job: TrainingJob, world: World, folder: RunFolder, held: ExitStack) -> Start:
    run_id = uuid.uuid4().hex[:12]
    folder.prepare()
    if job.config.train.resume == "auto" and _is_finished(job, world, folder):
        if folder.left_over():
            with owner_lock(folder, run_id):
                folder.sweep()
        return Start(folder, run_id, is_finished=True)
    held.enter_context(owner_lock(folder, run_id))
    folder.sweep()
    if job.config.train.resume == "never":
        folder.require_new()
        return Start(folder, run_id)
    chosen = choose_checkpoint(folder)
    if chosen is None:
        # Nothing of an earlier part is kept; yet it was meant to be another run.
        if folder.config.exists() and folder.metrics.exists():
            require_same_settings(run_settings(folder), as_absolute(job.config))
        return Start(folder, run_id)
    position = chosen.checkpoint.position
    where = f"The checkpoint of step {position.global_step}"
    for line in require_same_run(position.identity, job, world, where=where):
        logger.warning("%s; the learning rate follows the new length from here on.", line)
    if folder.config.exists():
        run_settings(folder)
    changes = (*position.changes, *require_whole_records(folder, position))
    return Start(folder, run_id, chosen.checkpoint, changes=changes)


def _is_finished(job: TrainingJob, world: World, folder: RunFolder) -> bool:
    """Whether there is a model already, and nothing is asked for that it is not."""
    ending = read_ending(folder)
    if ending is None or ending.ending != "finished":
        return False
    if require_same_run(ending.identity, job, world, where=f"The model in {folder.root}"):
        return False
    lacks_merged = job.config.lora.merge and not folder.merged.exists()
    return folder.model.exists() and not lacks_merged
