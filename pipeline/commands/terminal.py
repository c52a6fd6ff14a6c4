"""The output of commands: results, rows, and typer's messages on wrong arguments.

Of several ranks, only the first prints.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from ...schemas.errors import did_you_mean
from ...schemas.safe_text import safe
from ...stages.tracking.progress import Progress

if TYPE_CHECKING:
    from rich.text import Text

    from ..work import CommandResult


def echo(text: str, *, err: bool = False) -> None:
    """Prints text without secrets and terminal control characters."""
    typer.echo(safe(text), err=err)


def echo_once(text: str) -> None:
    """Prints a result on the first rank."""
    if is_first_rank():
        echo(text)


def echo_result(result: CommandResult[Any, Any]) -> None:
    """Prints the result on the first rank, and on the rank that published it."""
    if result.has_published or is_first_rank():
        echo(result.text())


def echo_row(line: str | Text) -> None:
    """Prints a line of a row; in colours on a terminal unless NO_COLOR is set."""
    text = safe(str(line))
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    is_masked = text != str(line)
    if isinstance(line, str) or is_masked or not is_terminal or os.environ.get("NO_COLOR"):
        typer.echo(text)
    else:
        from rich.console import Console

        Console(soft_wrap=True).print(line)


def begin_work() -> Progress:
    """The progress display, on the first rank only.

    Garbage collection is enabled from now on, but skips the objects of imported modules.
    """
    gc.freeze()
    gc.enable()
    return Progress(sys.stderr if is_first_rank() else None)


def is_first_rank() -> bool:
    """Whether this process is the first of those that were launched together."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


class SafeGroup(TyperGroup):
    """A group of commands whose error messages are safe to print."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments up to the name of a command."""
        with _readable():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Parses the rest and runs the command."""
        with _readable():
            return super().invoke(ctx)


@contextmanager
def _readable() -> Iterator[None]:
    """Masks secrets in typer's errors; for an unknown flag, suggests the closest one."""
    try:
        yield
    except Exception as error:
        message = getattr(error, "message", None)  # what typer shows
        if isinstance(message, str) and (flag := getattr(error, "option_name", "")):
            from ..options.settings_table import flag_of, meant_by

            command = getattr(getattr(error, "ctx", None), "info_name", "")
            if meant := [flag_of(name, command) or name for name in meant_by(flag)]:
                message = f"{message}.{did_you_mean(meant)}"
                vars(error)["possibilities"] = None
        if isinstance(message, str):
            vars(error)["message"] = safe(message)
        raise
