"""Saves checkpoints on all ranks, and checks the free disk space for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...schemas.checkpoint import (
    Checkpoint,
    FittedBatches,
    Later,
    Peers,
    Position,
    Retention,
    Saved,
)
from ...schemas.errors import AlignError, StorageError, log_failure
from ...stages.engine.deepspeed_compat import whole_numel
from ...stages.engine.deepspeed_config import stage_of
from ...stages.engine.distributed import gathered, run_on_rank_zero
from ...stages.engine.optimizers import states_of
from ...stages.model.loading.model_folder import model_tensors
from ...stages.model.logprobs import causal_model
from ...stages.storage.disk import fs
from ...stages.storage.run.checkpoints import (
    add_checkpoint_metrics,
    read_checkpoint,
    save_checkpoint,
)
from ...stages.storage.run.run_folder import RunFolder
from ..plan.workload import planned_tokens
from .resume import Start, identity_of, made_with

if TYPE_CHECKING:
    from ...stages.train.loop import TrainingPosition
    from .training_job import Session

logger = logging.getLogger("align")

# torchrun and deepspeed kill half a minute after they asked to stop.
SLOW_SECONDS = 20.0


class Checkpointer:
    """Saves checkpoints of one run, and counts those that could not be saved in a row."""

    MOST_FAILURES = 3

    def __init__(self, session: Session, start: Start) -> None:
        self._session = session
        self._start = start
        self._identity, self._made_with = identity_of(session), made_with(session)
        self.failures = 0
        self._saved: int | None = start.checkpoint_step if start.checkpoint else None
        self._failed: int | None = None

    def has(self, position: TrainingPosition) -> bool:
        """Whether the last checkpoint is that of this step."""
        return self._saved == position.step

    def add_metrics(self, position: TrainingPosition, metrics: Mapping[str, float]) -> None:
        """Rank zero adds these metrics to the checkpoint of this step, if there is one."""
        if not self.has(position) or self._session.world.rank:
            return
        try:
            add_checkpoint_metrics(
                self._start.folder,
                position.step,
                Later(metrics, position.best, self._fitted(position)),
                run_id=self._start.run_id,
                retention=self._retention,
            )
        except AlignError as error:
            logger.warning(
                "The checkpoint of step %d could not be given its metrics: %s", position.step, error
            )

    def save(
        self, position: TrainingPosition, metrics: Mapping[str, float], *, mlflow_run_id: str
    ) -> Saved:
        """Every rank writes its part; the checkpoint counts only if all succeed."""
        session = self._session
        began = time.monotonic()
        if lack := run_on_rank_zero(
            session.world, lambda: lack_of_space(session, self._start.folder)
        ):
            saved = Saved(position.step, lack)
            self._count(position, saved)
            return saved
        saved = save_checkpoint(
            self._start.folder,
            Checkpoint(
                __version__, self._position(position, metrics, mlflow_run_id), (), position.best
            ),
            session.engine.save_state,
            run_id=self._start.run_id,
            peers=Peers(session.world.rank, lambda mine: gathered(session.world, mine)),
            retention=self._retention,
        )
        self._count(position, saved)
        if self._start.remote and saved.succeeded and session.world.rank == 0:
            with log_failure("The checkpoint is on this machine alone until the next one"):
                self._start.remote.push()
        if session.world.rank == 0 and (took := time.monotonic() - began) > SLOW_SECONDS:
            logger.warning(
                "Saving took %.0f s. Launchers kill 30 s after they ask to stop: save more often "
                "than you can afford to lose, or to a faster disk.",
                took,
            )
        return saved

    @property
    def _retention(self) -> Retention:
        train = self._session.job.config.train
        return Retention(train.keep_last, train.best)

    def _count(self, position: TrainingPosition, saved: Saved) -> None:
        if saved.succeeded:
            self.failures, self._saved = 0, position.step
        elif position.step != self._failed:
            self.failures, self._failed = self.failures + 1, position.step

    def _position(
        self, position: TrainingPosition, metrics: Mapping[str, float], run_id: str
    ) -> Position:
        return Position(
            global_step=position.step,
            cursor=position.cursor,
            identity=self._identity,
            made_with=self._made_with,
            changes=self._start.changes,
            mlflow_run_id=run_id,
            memory=position.state,
            window={name: (one.total, one.count) for name, one in position.window.items()},
            metrics=dict(metrics),
            fitted=self._fitted(position),
        )

    def _fitted(self, position: TrainingPosition) -> FittedBatches | None:
        return FittedBatches(planned_by(self._session), position.fits) if position.fits else None


def planned_by(session: Session) -> int:
    """The micro-batch that a run asks for, in tokens."""
    return planned_tokens(session.job.config.train, session.policy.device.type)


def require_disk_space(session: Session, folder: RunFolder) -> None:
    """Refuses a disk without space for one checkpoint and the model; warns if not all fit."""
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


def lack_of_space(session: Session, folder: RunFolder) -> str:
    """The reason why one more checkpoint does not fit; empty if it does."""
    needed, free = checkpoint_bytes(session, folder), fs.free_bytes(folder.root)
    if free >= needed:
        return ""
    return f"{folder.checkpoints}: about {needed:,} bytes are needed, and {free:,} are free"


def require_space_for_model(session: Session, folder: RunFolder) -> None:
    """Refuses to write a model of which only a part would fit."""
    needed, free = model_bytes(session), fs.free_bytes(folder.root)
    if free < needed:
        raise StorageError(
            f"{folder.model}: about {needed:,} bytes are needed, and {free:,} are free. Free some "
            "space, then run the same command with --resume auto: the checkpoint is kept."
        )


def checkpoint_bytes(session: Session, folder: RunFolder) -> int:
    """The size of the newest checkpoint; before the first, of weights and optimizer state."""
    for step in folder.steps()[::-1]:
        try:
            return sum(file.bytes for file in read_checkpoint(folder.step(step)).files)
        except AlignError:  # damaged: its size is not known
            continue
    width, stage = _width(session), stage_of(session.engine_config)
    # Under ZeRO, and in 16 bits, there is a copy in 32; under ZeRO-3 there is no other.
    weights = (width if stage < 3 else 0) + (4 if stage or width < 4 else 0)
    kind = session.engine_config.get("optimizer", {}).get("type", "")
    per_weight = weights + 4 * states_of(str(kind))
    return int(per_weight * sum(map(whole_numel, _learning(session))))


def model_bytes(session: Session) -> int:
    """The size of the saved model: the adapter, the whole policy, or both."""
    lora, width = session.job.config.lora, _width(session)
    stored = sum(prod(one.shape) for one in model_tensors(Path(session.job.policy.path)))
    whole = max(stored, sum(map(whole_numel, session.policy.parameters())))
    adapter = sum(map(whole_numel, _learning(session)))
    counts = (adapter if lora.enabled else 0) + (whole if lora.merge or not lora.enabled else 0)
    return width * counts


def _learning(session: Session) -> list[Any]:
    return [one for one in session.policy.parameters() if one.requires_grad]


def _width(session: Session) -> int:
    return int(causal_model(session.policy.model).dtype.itemsize)
