"""The commands that make preference data: sample, judge, select, and rounds of all of them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ...schemas.errors import UsageError
from .settings_command import Part, SettingsCommand, settings_of
from .terminal import begin_work, print_result, recorded_by_first, say

Prompts = Annotated[list[str] | None, typer.Argument(help="Files or folders with prompts.")]
Samples = Annotated[
    str | None, typer.Argument(help="A folder made by `align sample`; none with --calibrate.")
]
Judged = Annotated[
    str, typer.Argument(help="A folder made by `align judge`, or a file with scores.")
]
app = typer.Typer()
with_settings = partial(app.command, cls=SettingsCommand, rich_help_panel="Rounds")


@with_settings(epilog="Example: align sample prompts.jsonl --model DIR -n 4")
def sample(context: typer.Context, prompts: Prompts = None, part: Part = None) -> None:
    """Sample completions of prompts from a policy; what was sampled before is not sampled again."""
    from ..parts import part_of
    from ..tables.sample import sample as run_sample

    given = settings_of(context, data=prompts)
    own_part = part_of(part, os.environ)
    recorded = recorded_by_first(given.config)
    progress = begin_work()
    print_result(run_sample(recorded, progress=progress, part=own_part))


@with_settings(epilog="Example: align judge align-samples --by reward --reward-model DIR")
def judge(
    context: typer.Context,
    samples: Samples = None,
    calibrate: Annotated[
        str | None,
        typer.Option("--calibrate", help="Preference data: only measure the judge on them."),
    ] = None,
    part: Part = None,
) -> None:
    """Judge samples: by a reward model, a language model, or a check of their answers."""
    from ..parts import part_of
    from ..tables.judge import calibrate as run_calibrate
    from ..tables.judge import judge as run_judge

    if (samples is None) == (calibrate is None):
        raise UsageError("Name a folder of samples to judge, or data by --calibrate: one of them.")
    given = settings_of(context, near=[samples or calibrate or ""]).config
    if calibrate:
        if part:
            raise UsageError("--part: --calibrate measures in one process. Leave out one of them.")
        say(run_calibrate(given, calibrate, progress=begin_work()).text())
        return
    assert samples
    own_part = part_of(part, os.environ)
    print_result(run_judge(recorded_by_first(given), samples, progress=begin_work(), part=own_part))


@with_settings(epilog="Example: align select align-judged --rows labels")
def select(context: typer.Context, judged: Judged) -> None:
    """Make preference data of judged samples: pairs, labels, or groups with scores."""
    from ..tables.select_rows import select as run_select

    say(run_select(settings_of(context, near=[judged]).config, judged).text())


@with_settings(epilog="Example: align rounds align.yaml")
def rounds(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="An align.yaml with the settings of all rounds.")],
) -> None:
    """Go through rounds of sample, judge, select, precompute-ref and train, each on the last."""
    from ..rounds.rounds import run_rounds

    say(run_rounds(settings_of(context, file=config), progress=begin_work()).text())
