"""Saving what a run needs to go on, together with all other ranks."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ..schemas.checkpoint import CheckpointFile, Peers, Position, Retention, Saved
from ..schemas.errors import AlignError
from ..stages.engine.distributed import from_first, gathered
from ..stages.storage.checkpoints import credit, save_checkpoint
from ..stages.storage.run_folder import described
from .room import lack_of_room
from .run_identity import identity_of, made_with

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..stages.train.loop import Place
    from .run_start import Start
    from .session import Session

logger = logging.getLogger("align")

# torchrun and deepspeed kill half a minute after they asked to stop.
SLOW_SECONDS = 20.0


class Keeper:
    """Saves checkpoints of one run, and counts those that could not be saved in a row."""

    MOST_FAILURES = 3

    def __init__(self, session: Session, start: Start) -> None:
        self._session = session
        self._start = start
        self._identity, self._made_with = identity_of(session), made_with(session)
        self.failures = 0
        self._saved: int | None = start.checkpoint_step if start.checkpoint else None
        self._failed: int | None = None

    def has(self, place: Place) -> bool:
        """Whether the last checkpoint is that of this step."""
        return self._saved == place.step

    def credit(self, place: Place, metrics: Mapping[str, float]) -> None:
        """The first rank adds what was measured to the checkpoint of this step, if there is one."""
        if not self.has(place) or self._session.world.rank:
            return
        try:
            credit(
                self._start.folder,
                place.step,
                metrics,
                journal=self._journal(),
                run_id=self._start.run_id,
                retention=self._retention,
            )
        except AlignError as error:
            logger.warning("The checkpoint of step %d is not told: %s", place.step, error)

    def save(self, place: Place, metrics: Mapping[str, float], *, mlflow_run_id: str) -> Saved:
        """Every rank writes its part; there is a checkpoint only where all could."""
        session = self._session
        began = time.monotonic()
        if lack := from_first(session.world, lambda: lack_of_room(session, self._start.folder)):
            saved = Saved(place.step, lack)
            self._count(place, saved)
            return saved
        saved = save_checkpoint(
            self._start.folder,
            self._position(place, metrics, mlflow_run_id),
            session.engine.save_state,
            run_id=self._start.run_id,
            peers=Peers(session.world.rank, lambda mine: gathered(session.world, mine)),
            retention=self._retention,
        )
        self._count(place, saved)
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

    def _count(self, place: Place, saved: Saved) -> None:
        if saved.succeeded:
            self.failures, self._saved = 0, place.step
        elif place.step != self._failed:
            self.failures, self._failed = self.failures + 1, place.step

    def _position(self, place: Place, metrics: Mapping[str, float], run_id: str) -> Position:
        return Position(
            global_step=place.step,
            cursor=place.cursor,
            identity=self._identity,
            made_with=self._made_with,
            changes=self._start.changes,
            journal=self._journal(),
            mlflow_run_id=run_id,
            memory=place.memory,
            window=place.window,
            metrics=dict(metrics),
        )

    def _journal(self) -> CheckpointFile:
        """What was measured until now; only the first rank writes it, and what it says counts."""
        folder = self._start.folder
        if self._session.world.rank:
            return CheckpointFile(folder.metrics.name, 0, "")
        return described(folder.root, folder.metrics)
