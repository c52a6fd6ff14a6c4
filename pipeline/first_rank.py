"""Among ranks the first speaks for all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from ..stages.tracking.console import make_progress
from ..stages.tracking.no_progress import NoProgress

if TYPE_CHECKING:
    from ..schemas.tracking import Progress


def progress_of_first() -> Progress:
    """Progress to look at, or none."""
    return make_progress() if _is_first_rank() else NoProgress()


def say_once(text: str) -> None:
    """Prints a result."""
    if _is_first_rank():
        typer.echo(text)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
