"""The commands that make preference data: sample, judge, select, and rounds of all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ...schemas.errors import UsageError
from ..options.flags import ConfigFile, Part, Sets, with_flags
from .terminal import begin_work, print_result, recorded_by_first, say

Prompts = Annotated[list[str] | None, typer.Argument(help="Files or folders with prompts.")]
Samples = Annotated[
    str | None, typer.Argument(help="A folder made by `align sample`; none with --calibrate.")
]
Judged = Annotated[
    str, typer.Argument(help="A folder made by `align judge`, or a file with scores.")
]


def add_to(app: typer.Typer) -> None:
    """Makes them commands of the app."""
    for command in (sample, judge, select, rounds):
        app.command(rich_help_panel="Rounds")(command)


@with_flags("sample")
def sample(
    flags: dict[str, Any],
    prompts: Prompts = None,
    part: Part = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Sample completions of prompts from a policy; what was sampled before is not sampled again."""
    from ..options.settings import load_settings
    from ..parts import part_of
    from ..tables.sample import sample as run_sample

    given = load_settings(flags, sets or [], file=config, data=prompts or [], command="sample")
    own_part = part_of(part, os.environ)
    recorded = recorded_by_first(given.config)
    progress = begin_work()
    print_result(run_sample(recorded, progress=progress, part=own_part))


@with_flags("judge")
def judge(
    flags: dict[str, Any],
    samples: Samples = None,
    calibrate: Annotated[
        str | None,
        typer.Option("--calibrate", help="Preference data: only measure the judge on them."),
    ] = None,
    part: Part = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Judge samples: by a reward model, a language model, or a check of their answers."""
    from ..options.settings import load_settings
    from ..parts import part_of
    from ..tables.judge import calibrate as run_calibrate
    from ..tables.judge import judge as run_judge

    if (samples is None) == (calibrate is None):
        raise UsageError("Name a folder of samples to judge, or data by --calibrate: one of them.")
    near = [samples or calibrate or ""]
    given = load_settings(flags, sets or [], file=config, near=near, command="judge").config
    if calibrate:
        if part:
            raise UsageError("--part: --calibrate measures in one process. Leave out one of them.")
        say(run_calibrate(given, calibrate, progress=begin_work()).text())
        return
    assert samples
    own_part = part_of(part, os.environ)
    print_result(run_judge(recorded_by_first(given), samples, progress=begin_work(), part=own_part))


@with_flags("select")
def select(
    flags: dict[str, Any], judged: Judged, config: ConfigFile = None, sets: Sets = None
) -> None:
    """Make preference data of judged samples: pairs, labels, or groups with scores."""
    from ..options.settings import load_settings
    from ..tables.select_rows import select as run_select

    given = load_settings(flags, sets or [], file=config, near=[judged], command="select")
    say(run_select(given.config, judged).text())


@with_flags("rounds")
def rounds(
    flags: dict[str, Any],
    config: Annotated[Path, typer.Argument(help="An align.yaml with the settings of all rounds.")],
    sets: Sets = None,
) -> None:
    """Go through rounds of sample, judge, select, precompute-ref and train, each on the last."""
    from ..options.settings import load_settings
    from ..rounds.rounds import run_rounds

    given = load_settings(flags, sets or [], file=config, command="rounds")
    say(run_rounds(given, progress=begin_work()).text())
