"""Records the work on a folder, after what earlier runs there left was sent."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...schemas.config import TrackingOptions
from ...schemas.errors import AlignError, StorageError
from ...stages.tracking.journaled_run import Run, recorded
from ...stages.tracking.outbox import unsent_runs
from ...stages.tracking.tracker import addresses, kind_of
from .tracker_sync import sync_ledger

logger = logging.getLogger("align")


@contextmanager
def recorded_work(
    options: TrackingOptions,
    home: Path,
    stage: str,
    *,
    name: str = "",
    is_alone: bool = True,
) -> Iterator[Run]:
    """Records the work on a folder; what earlier runs there left is sent first, if it is alone."""
    before = send_earlier(home, options) if is_alone else {}
    with recorded(options, home, stage, name=name, is_alone=is_alone, goes_on_from=before) as run:
        yield run


def send_earlier(home: Path, options: TrackingOptions) -> dict[str, str]:
    """Sends what earlier runs left; returns by tracker the id of the last one if it was cut off.

    A failure is logged, and what was not sent stays.
    """
    run_ids = {}
    for kind in map(kind_of, addresses(options, home)):
        for folder in unsent_runs(home):
            if not folder.ledger(kind.name).exists():
                continue
            try:
                sent = sync_ledger(kind, folder, home, options)
            except AlignError as error:
                title = kind.title
                logger.warning("%s does not get the rest of an earlier run: %s", title, error)
                if isinstance(error, StorageError):
                    break  # the store would fail the others too, each after a wait
            else:
                run_ids[kind.name] = "" if sent.status == "FINISHED" else sent.run_id
    return run_ids
