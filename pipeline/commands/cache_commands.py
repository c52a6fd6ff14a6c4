"""The commands of data and caches: precompute-ref, score, check, verify, inspect, export."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .settings_command import Data, Part, SettingsCommand, settings_of
from .terminal import begin_work, print_result, recorded_by_first, say

if TYPE_CHECKING:
    from rich.text import Text

CacheDir = Annotated[str, typer.Argument(help="A cache made by precompute-ref.")]
Model = Annotated[str | None, typer.Option("--model", help="Folder of the reference model.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no row as the model reads it.")]
app = typer.Typer()
command = partial(app.command, rich_help_panel="Data and cache")
with_settings = partial(app.command, cls=SettingsCommand, rich_help_panel="Data and cache")


@with_settings(
    "precompute-ref", epilog="Example: align precompute-ref data.jsonl --model DIR --token-logps"
)
def precompute_ref(
    context: typer.Context, data: Data = None, part: Part = None, quiet: Quiet = False
) -> None:
    """Run the frozen reference over preference data and store its log-probs in Parquet shards."""
    from ..options.first_checks import require_inputs

    given = settings_of(context, data=data).config
    require_inputs(given)
    from ...stages.model.reference import HfReference
    from ...stages.storage.disk.digests import own_digests
    from ..jobs.object_inputs import with_local_inputs
    from ..parts import part_of
    from ..precompute.opening import require_model
    from ..precompute.precompute import precompute

    own_part = part_of(part, os.environ)
    require_model(given, own_part)
    local = with_local_inputs(given)
    recorded = recorded_by_first(local)
    reference, progress = HfReference(local.model, own_digests()), begin_work()
    print_result(
        precompute(recorded, reference, progress=progress, part=own_part, shows_row=not quiet)
    )


@with_settings(epilog="Example: align score data.jsonl --reward-model DIR")
def score(context: typer.Context, data: Data = None, part: Part = None) -> None:
    """Score completions with a reward model, and write the data with its scores."""
    from ...schemas.errors import UsageError
    from ..parts import part_of
    from ..tables.score_rewards import rewards_from_model

    given = settings_of(context, data=data).config
    if not given.rewards.model:
        raise UsageError("No reward model. Pass --reward-model DIR.")
    from ...stages.model.reward_model import HfReward
    from ...stages.storage.disk.digests import own_digests

    own_part = part_of(part, os.environ)
    print_result(
        rewards_from_model(
            recorded_by_first(given),
            lambda options: HfReward(options, own_digests()),
            progress=begin_work(),
            part=own_part,
        )
    )


@with_settings(epilog="Example: align check data.jsonl --model DIR")
def check(context: typer.Context, data: Data = None) -> None:
    """Show what data are taken for, what a model would read, and what would be dropped."""
    from ..jobs.object_inputs import with_local_inputs
    from ..precompute.check_data import check_data

    local = with_local_inputs(settings_of(context, data=data).config)
    for line in check_data(local, progress=begin_work()).lines():
        _say_row(line)


@with_settings(epilog="Example: align verify align-cache --rescore 64")
def verify(
    context: typer.Context,
    cache: CacheDir,
    model: Model = None,
    rescore: Annotated[int, typer.Option(min=0, help="Rows to score again; 0: none.")] = 16,
) -> None:
    """Check every digest of a cache, and score a sample of rows again with the reference."""
    from ...stages.model.reference import HfReference
    from ..precompute.verify import verify as run_verify

    given = settings_of(context, near=[cache]).config
    say(run_verify(cache, given.model, model=model, rescore=rescore, open_reference=HfReference))


@command(epilog="Example: align inspect align-cache --row data.jsonl:17")
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


@command(epilog="Example: align export align-cache --output pairs.parquet")
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
