"""The first moments of a run: its folder, its owner, and the checkpoint it goes on from."""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..stages.engine.peers import from_first
from ..stages.storage import fs
from ..stages.storage.locks import owner_lock
from ..stages.storage.restore import choose_checkpoint
from ..stages.storage.run_folder import RunFolder
from .resuming import require_same_run, require_same_world
from .settings import as_absolute, as_yaml, read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..schemas.checkpoint import Checkpoint
    from ..schemas.engine import World
    from .training_job import TrainingJob


@dataclass(frozen=True)
class Start:
    """What every rank knows of the run's folder when it begins."""

    folder: RunFolder
    run_id: str
    checkpoint: Checkpoint | None
    is_finished: bool  # there is a model already, and nothing was changed since
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


def _enter(job: TrainingJob, world: World, folder: RunFolder, held: ExitStack) -> Start:
    run_id = uuid.uuid4().hex[:12]
    folder.prepare()
    held.enter_context(owner_lock(folder, run_id))
    folder.sweep()
    is_finished = False
    if job.config.train.resume == "never":
        folder.require_new()
    elif folder.config.exists() and folder.metrics.exists():
        changed = require_same_run(read_yaml(folder.config), as_absolute(job.config))
        lacks_merged = job.config.lora.merge and not folder.merged.exists()
        is_finished = folder.model.exists() and not (changed or lacks_merged)
    chosen = choose_checkpoint(folder)
    if chosen:
        require_same_world(chosen.checkpoint.position, job, world)
    fs.publish(folder.config, as_yaml(job.config).encode(), label="config")
    return Start(folder, run_id, chosen.checkpoint if chosen else None, is_finished)
