"""A tracked run around a block of work, closed with the truth about how it ended."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..schemas.errors import Interrupted
from ..stages.tracking.null_run import NullRun

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..schemas.config import TrackingOptions
    from ..schemas.tracking import Run


@contextmanager
def recorded(
    options: TrackingOptions, stage: str, *, is_recorded: bool, note: Path | None = None
) -> Iterator[Run]:
    """Opens a run in the tracking store, or one that records nothing.

    Whoever owns the folder of `note` learns from it which run of this kind was killed there.
    """
    run = _open(options, stage, note) if is_recorded and options.mlflow else NullRun()
    try:
        yield run
    except (Interrupted, KeyboardInterrupt):
        run.finish("KILLED")
        raise
    except BaseException:
        run.finish("FAILED")
        raise
    run.finish("FINISHED")


def settle(options: TrackingOptions, note: Path) -> None:
    """Tells the tracking store the end of a run that was killed; the folder has to be owned."""
    if options.mlflow and note.exists():
        # As below.
        from ..stages.tracking.mlflow_run import settle_noted  # noqa: PLC0415

        settle_noted(options, note)


def _open(options: TrackingOptions, stage: str, note: Path | None) -> Run:
    # MLflow takes seconds to import: only a run that is recorded pays for it.
    from ..stages.tracking.mlflow_run import open_run  # noqa: PLC0415

    return open_run(options, name=stage, tags={"align.stage": stage}, note=note)
