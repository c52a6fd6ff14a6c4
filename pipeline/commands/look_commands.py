"""The commands that look at methods and runs, and bring runs to MLflow."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .settings_command import ConfigFile
from .terminal import begin_work, say

Uri = Annotated[str, typer.Option(help="Another store than your own, even if the run names it.")]
app = typer.Typer()
command = partial(app.command, rich_help_panel="Look")


@command(epilog="Example: align methods kto")
def methods(
    name: Annotated[str | None, typer.Argument(help="One of them, to be explained.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as the README has it.")
    ] = False,
) -> None:
    """List the methods with their losses and options, or explain one."""
    from ...stages.methods.method_docs import describe, markdown_table, render_method, render_table
    from ...stages.methods.table import METHODS, find_method

    chosen = [find_method(name)] if name else list(METHODS.values())
    if as_json:
        say(json.dumps([*map(describe, chosen)], indent=2, ensure_ascii=False))
    elif markdown:
        say(markdown_table(chosen).rstrip())
    else:
        say((render_method(chosen[0]) if name else render_table(chosen)).rstrip())


@command(epilog="Example: align report align-run")
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    answers: Annotated[
        int, typer.Option(min=0, help="Held-out prompts to answer before and after; 0: none.")
    ] = 0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    config: ConfigFile = None,
) -> None:
    """Put a training run on one page, report.html: curves, held-out completions, lineage.

    With --answers the policy as it began and the trained one are loaded, one after the other.
    """
    if answers:
        from ..train.run_answers import answer_again

        page = answer_again(
            run, count=answers, most_tokens=answer_tokens, config=config, progress=begin_work()
        )
    else:
        from ..train.run_report import training_folder, write_report

        write_report(run)
        page = training_folder(run).report
    say(f"{page} written. It needs no network: open it in any browser.")


@command(epilog="Example: align diff runs/dpo runs/kto")
def diff(
    run_a: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    run_b: Annotated[Path, typer.Argument(help="Folder of another one.")],
    step: Annotated[
        int | None, typer.Option(help="Compare after this step (default: each one's last).")
    ] = None,
) -> None:
    """Compare two runs row by row: which held-out rows flip, and whether chance explains it."""
    from ..train.run_diff import diff_runs

    say(diff_runs(run_a, run_b, step).text())


@command(epilog="Example: align register align-run prefs --alias champion")
def register(
    run: Annotated[Path, typer.Argument(help="Folder of a finished training run.")],
    name: Annotated[str, typer.Argument(help="Name of the model in MLflow's registry.")],
    alias: Annotated[
        str, typer.Option(help="Alias that from now on is this version, for example champion.")
    ] = "",
    uri: Uri = "",
    config: ConfigFile = None,
) -> None:
    """Upload the trained model of a run to MLflow and make it a version of a registered model."""
    from ..jobs.tracker_sync import own_options
    from ..train.register import register as register_model

    made = register_model(run, own_options(run, config), name=name, alias=alias, uri=uri)
    known = "" if made.is_new else ", as it was before"
    named = f"; {alias} is this version" if alias else ""
    say(f"{run} is version {made.number} of {made.name}{known}{named}.")


@command("mlflow-sync", epilog="Example: align mlflow-sync align-run")
def mlflow_sync(
    run: Annotated[Path, typer.Argument(help="Folder of a training run, sweep, scores or cache.")],
    uri: Uri = "",
    config: ConfigFile = None,
) -> None:
    """Tell trackers, as MLflow, what they missed of a run; telling them twice changes nothing."""
    from ...schemas.errors import counted
    from ..jobs.tracker_sync import own_options, sync_runs

    for synced in sync_runs(run, own_options(run, config), uri=uri):
        sent = f"{counted(synced.points_sent, 'numbers')} sent"
        say(f"{synced.uri}: run {synced.run_id} is {synced.status}\n{sent}")
