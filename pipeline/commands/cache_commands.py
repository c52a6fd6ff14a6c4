"""The commands that look at data and caches: check, verify, inspect, export."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..options.flags import ConfigFile, Data, Sets, with_flags
from .terminal import begin_work, say

if TYPE_CHECKING:
    from rich.text import Text

CacheDir = Annotated[str, typer.Argument(help="A cache made by precompute-ref.")]
Model = Annotated[str | None, typer.Option("--model", help="Folder of the reference model.")]


def add_looking_to(app: typer.Typer) -> None:
    """Makes them commands of the app."""
    for command in (check, verify, inspect, export):
        app.command(rich_help_panel="Data and cache")(command)


def _say_row(line: str | Text) -> None:
    """Prints a line of a row, in its colours on a terminal unless NO_COLOR is set."""
    from rich.console import Console

    from ...schemas.safe_text import safe

    text, is_terminal = safe(str(line)), sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    is_masked = text != str(line)
    if isinstance(line, str) or is_masked or not is_terminal or os.environ.get("NO_COLOR"):
        typer.echo(text)
    else:
        Console(soft_wrap=True).print(line)


@with_flags("check")
def check(
    flags: dict[str, Any], data: Data = None, config: ConfigFile = None, sets: Sets = None
) -> None:
    """Show what data are taken for, what a model would read, and what would be dropped."""
    from ..jobs.object_inputs import with_local_inputs
    from ..options.settings import load_settings
    from ..precompute.check_data import check_data

    given = load_settings(flags, sets or [], file=config, data=data or [], command="check")
    for line in check_data(with_local_inputs(given.config), progress=begin_work()).lines():
        _say_row(line)


def verify(
    cache: CacheDir,
    model: Model = None,
    rescore: Annotated[int, typer.Option(min=0, help="Rows to score again; 0: none.")] = 16,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Check every digest of a cache, and score a sample of rows again with the reference."""
    from ...stages.model.reference import HfReference
    from ..options.settings import load_settings
    from ..precompute.verify import verify as run_verify

    given = load_settings({}, sets or [], file=config, near=[cache], command="verify").config
    say(run_verify(cache, given.model, model=model, rescore=rescore, open_reference=HfReference))


def inspect(
    cache: CacheDir,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    row: Annotated[
        str | None, typer.Option("--row", help="Show this row: FILE:ROW, or an id's beginning.")
    ] = None,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="List the rows that could not be used, and why.")
    ] = False,
    model: Model = None,
) -> None:
    """Show what a cache holds: rows, lengths, truncation, balance, log-probs, drops."""
    from ..jobs.object_inputs import cache_at
    from ..precompute.inspect_rows import lines_of_inspection

    shown = lines_of_inspection(
        cache_at(cache), row=row, rejected=rejected, as_json=as_json, model=model
    )
    for line in shown:
        _say_row(line)


def export(
    cache: CacheDir,
    to: Annotated[Literal["trl"], typer.Option(help="Whose column names to use.")] = "trl",
    output: Annotated[
        Path | None, typer.Option(help="File (default: CACHE/../CACHE-trl.parquet).")
    ] = None,
    model: Model = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
) -> None:
    """Write a cache as one flat Parquet file: text, ids and log-probs, named as TRL names them.

    TRL 1.16 reads the text alone. It takes no reference log-probs from a file: remove the ref_
    columns before you pass precompute_ref_log_probs.
    """
    from ...schemas.errors import counted
    from ..jobs.object_inputs import cache_at
    from ..precompute.export import beside
    from ..precompute.export import export as run_export

    folder = cache_at(cache)
    target = output or beside(folder, to)
    rows = run_export(folder.root, target, model=model, overwrite=overwrite)
    say(f"{target}: {counted(rows, 'rows')}")
