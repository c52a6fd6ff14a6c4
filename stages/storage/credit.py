"""What was measured after a checkpoint was saved, written into its record; its files stay."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from ...schemas.json_codec import digest_of, to_json
from . import fs
from .restore import read_checkpoint
from .retention import prune
from .run_folder import RECORD_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...schemas.checkpoint import Checkpoint, CheckpointFile, Retention
    from .run_folder import RunFolder


def credit(
    folder: RunFolder,
    step: int,
    metrics: Mapping[str, float],
    *,
    journal: CheckpointFile,
    run_id: str,
    retention: Retention,
) -> None:
    """Adds to what a checkpoint says was measured there; one rank does this.

    It vouches for the journal as it is by then, with the line of what was measured.
    """
    known = read_checkpoint(folder.step(step))
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    position = dataclasses.replace(
        known.position,
        metrics={**known.position.metrics, **finite},
        journal=journal,
    )
    _replace(folder, dataclasses.replace(known, position=position), run_id)
    # A process that was killed may have left a `latest` that a power loss takes back.
    fs.fsync_folder(folder.checkpoints)
    prune(folder, retention, newest=step)


def _replace(folder: RunFolder, unsigned: Checkpoint, run_id: str) -> None:
    step = unsigned.position.global_step
    record = dataclasses.replace(unsigned, digest=digest_of(unsigned, "digest"))
    # Not beside the old one: a draft that stays behind would be a file the checkpoint has not.
    draft = folder.draft(step, run_id)
    fs.make_folder(draft)
    fs.write_new(draft / RECORD_NAME, to_json(record).encode())
    fs.rename(draft / RECORD_NAME, folder.step(step) / RECORD_NAME)
    # Not synced: a run that goes on from a checkpoint without its evaluation makes it again.
    fs.remove_folder(draft)
