"""What a person reads, and what is set for the whole process because this one is a command's.

Among ranks the first speaks for all.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from ..schemas.safe_text import hear, safe
from ..stages.tracking.mlflow_silence import WARNING, silence_mlflow
from ..stages.tracking.progress import NoProgress, Progress, make_progress


def own_process(arguments: Sequence[str]) -> None:
    """Sets what only a command may set; a library leaves the process of its host as it was."""
    # Arrow reads this when it is first imported. Its own pool keeps what was freed, beside what
    # torch then takes; the C library's gives both the same memory.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    silence_mlflow()  # DeepSpeed imports MLflow, which reads its settings then
    # A thread may send on to MLflow when nobody waits for it any more.
    for package in WARNING:
        warnings.filterwarnings("ignore", module=package)
    for word in arguments:
        hear(word.partition("=")[2] if "=" in word.partition("://")[0] else word)
    if logging.lastResort:  # by which Python says what nobody else was asked to say
        logging.lastResort.setFormatter(SafeFormatter())


class SafeFormatter(logging.Formatter):
    """Lines of a log, without secrets and what a terminal would obey."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, and its traceback."""
        return safe(super().format(record))


class SafeGroup(TyperGroup):
    """Commands; a word that is none of them may come out of a name of a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the words up to the command's name."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _make_safe(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Reads the words of a command and gives it."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            _make_safe(error)
            raise


def _make_safe(error: Exception) -> None:
    message = getattr(error, "message", None)
    if isinstance(message, str):  # it is one of those that Typer shows
        vars(error)["message"] = safe(message)


def say(text: str, *, err: bool = False) -> None:
    """Prints what may hold names and messages from elsewhere."""
    typer.echo(safe(text), err=err)


def progress_of_first() -> Progress:
    """Progress to look at, or none."""
    return make_progress() if is_first_rank() else NoProgress()


def say_once(text: str) -> None:
    """Prints a result."""
    if is_first_rank():
        say(text)


def is_first_rank() -> bool:
    """Whether this process is the first of those that were launched together."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
