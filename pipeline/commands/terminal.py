"""Output to the terminal, and settings of the whole process that only a command may make.

Among ranks the first speaks for all.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from typer.core import TyperGroup

from ... import __version__
from ...schemas.errors import did_you_mean
from ...schemas.safe_text import mask_secrets_of, safe
from ...stages.tracking.mlflow_silence import WARNING, silence_mlflow
from ...stages.tracking.progress import NoProgress, Progress, make_progress
from ..workers import HOW_THREADS_WAIT

if TYPE_CHECKING:
    from ...schemas.config import Config

# A thread that spins takes the core of whatever runs beside it, often of the very thread that it
# waits for; one that sleeps at once is late for the next of many short tasks. The spins, a tenth
# of a millisecond or less, are libgomp's own word; other libraries know the policy alone.
SOON_ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def _print_version(is_asked: bool) -> None:
    if is_asked:
        say(__version__)
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]


def own_process(arguments: Sequence[str]) -> None:
    """Applies the settings of the process; a library must not change its host."""
    # Imports make millions of objects and no garbage; `begin_work` ends this.
    gc.disable()
    # Arrow reads this when it is first imported. Its own pool keeps what was freed, beside what
    # torch then takes; the C library's gives both the same memory.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    # OpenMP reads this when torch is imported.
    if not any(name in os.environ for name in HOW_THREADS_WAIT):
        os.environ.update(SOON_ASLEEP)
    silence_mlflow()  # DeepSpeed imports MLflow, which reads its settings then
    # A thread may still send to MLflow when the program ends.
    for package in WARNING:
        warnings.filterwarnings("ignore", module=package)
    for word in arguments:
        mask_secrets_of(word.partition("=")[2] if "=" in word.partition("://")[0] else word)
    if logging.lastResort:  # Python's handler for records that no other handler takes
        logging.lastResort.setFormatter(SafeFormatter())


class SafeFormatter(logging.Formatter):
    """Log lines without secrets and terminal control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, and its traceback."""
        return safe(super().format(record))


class SafeGroup(TyperGroup):
    """A group of commands whose error messages are safe to print."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the words up to the command's name."""
        with _readable():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Reads the words of a command and gives it."""
        with _readable():
            return super().invoke(ctx)


@contextmanager
def _readable() -> Iterator[None]:
    """Makes what typer says of an error safe to print, with the flag that an unknown one means."""
    try:
        yield
    except Exception as error:
        message = getattr(error, "message", None)  # what typer shows
        if isinstance(message, str):
            name = getattr(error, "option_name", "")
            if name and (near := _meant(name, getattr(error, "ctx", None))):
                message = f"{message}.{did_you_mean(near)}"
                vars(error)["possibilities"] = None
            vars(error)["message"] = safe(message)
        raise


def _meant(flag: str, context: Any) -> list[str]:
    """The flags, or settings without one, that a name of another trainer means in a command."""
    from ..options.other_names import meant_by
    from ..options.table import flag_of

    command = getattr(context, "info_name", "")
    return [flag_of(name, command) or name for name in meant_by(flag)]


def say(text: str, *, err: bool = False) -> None:
    """Prints text without secrets and terminal control characters."""
    typer.echo(safe(text), err=err)


def begin_work() -> Progress:
    """To be called when all is imported; returns the display of progress, on the first rank only.

    Garbage is collected from here on, but never looked for among what has been imported.
    """
    gc.freeze()
    gc.enable()
    return make_progress() if is_first_rank() else NoProgress()


def say_once(text: str) -> None:
    """Prints a result on the first rank."""
    if is_first_rank():
        say(text)


class Result(Protocol):
    """The result of a command that many processes may have been given at once."""

    @property
    def has_published(self) -> bool:
        """Whether this process has written what all of them make."""
        ...

    def text(self) -> str:
        """A summary of a few lines."""
        ...


def print_result(made: Result) -> None:
    """Prints a result where it was published, and by the first rank of those that did not."""
    (say if made.has_published else say_once)(made.text())


def recorded_by_first(config: Config) -> Config:
    """The config, without a record of the run on all ranks but the first."""
    if is_first_rank():
        return config
    return replace(config, tracking=config.tracking.none())


def is_first_rank() -> bool:
    """Whether this process is the first of those launched together."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
