"""The commands that train, or say what a training needs: run, train, plan and sweep."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ...schemas.errors import UsageError
from .cache_commands import Quiet
from .settings_command import Data, SettingsCommand, settings_of
from .terminal import begin_work, say, say_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..options.settings import Settings
    from ..plan.planned_rows import GivenRows

GIB = 2**30
app = typer.Typer()
with_settings = partial(app.command, cls=SettingsCommand, rich_help_panel="Training")


@with_settings(epilog="Example: align run data.jsonl --model DIR --method kto --lora --lr 1e-5")
def run(context: typer.Context, data: Data = None, quiet: Quiet = False) -> None:
    """Score the reference over preference data and train on it: both stages in one command.

    --model is the reference, and where the policy begins unless --policy names another.

    The cache stays: the next run on the same data scores nothing.
    """
    from ..options.first_checks import asked_recipe, require_inputs, require_policy

    given = settings_of(context, data=data)
    asked_recipe(given.config)
    require_inputs(given.config)
    require_policy(given.config, "--policy")
    from ..train.both_stages import make_cache, settings_of_both, train_on_cache

    settings = settings_of_both(given)
    progress = begin_work()
    made = make_cache(settings, progress=progress, shows_row=not quiet)
    # The command that would be next is this one's own second half.
    say("\n".join(line for line in made.text().splitlines() if not line.startswith("next: ")))
    say(train_on_cache(settings, progress=progress).text())


@with_settings(epilog="Example: align train --method dpo --beta 0.1 --lr 1e-6 --eval-fraction 0.05")
def train(context: typer.Context) -> None:
    """Train a policy on the shards of a cache; the reference is never loaded."""
    from ..options.first_checks import require_training

    settings = settings_of(context)
    require_training(settings.config)
    from ..train.setup import check

    checked = check(settings)
    from ..train.train import train as run_training

    say_once(run_training(checked, progress=begin_work()).text())


@with_settings(epilog="Example: align plan --method kto --gpu 24g --lora")
def plan(
    context: typer.Context,
    gpu: Annotated[
        str, typer.Option("--gpu", help="Memory of a GPU: 24g, 48g, 80g, or bytes.")
    ] = "",
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, metavar="<int>", help="How many (default 1).")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, metavar="<int>", help="Without a cache: pairs to train on.")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="<int>", help="With --rows: tokens of a prompt (default 300)."),
    ] = None,
    completion_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="<int>", help="With --rows: tokens of a completion (default 300)."
        ),
    ] = None,
) -> None:
    """Say what a training needs before it begins: steps, tokens, memory of each GPU."""
    from ..plan.plan_text import plan_text
    from ..plan.run_plan import PlanRequest, plan_run
    from ..plan.setting_checks import bytes_of

    settings = settings_of(context)
    asked = PlanRequest(
        gpu_bytes=bytes_of(gpu, name="--gpu", least=GIB),
        gpus=gpus or 1,
        is_for_gpu=bool(gpu or gpus),
        rows=_given_rows(rows, prompt_tokens, completion_tokens),
    )
    say_once(plan_text(plan_run(settings, asked)))


def _given_rows(rows: int | None, prompt: int | None, completion: int | None) -> GivenRows | None:
    from ..plan.planned_rows import GivenRows

    if rows:
        return GivenRows(rows, prompt or 300, completion or 300)
    if prompt or completion:
        raise UsageError("--prompt-tokens and --completion-tokens are of --rows, which is missing.")
    return None


@with_settings(epilog="Example: align sweep --method dpo --method kto --lr 1e-6,1e-5")
def sweep(
    context: typer.Context,
    methods: Annotated[list[str], typer.Option("--method", help="A method; repeatable.")],
    vary: Annotated[
        list[str] | None, typer.Option(help="SETTING=V1,V2,… to try; repeatable.")
    ] = None,
    output: Annotated[
        str, typer.Option(help="Each run gets a folder in it.", metavar="<path>")
    ] = "align-sweep",
) -> None:
    """Train many methods and settings on one cache, and compare them in one table.

    A flag with several values, as --lr 1e-6,1e-5, tries each of them.
    """
    from ...stages.methods.table import recipe_of
    from ..options.flags import varied_in
    from ..options.settings import load_settings

    for method in methods:
        recipe_of(method, {})  # refused before torch is imported
    from ..train.sweep import sweep as run_sweep
    from ..train.sweep import trials_of, varied_by

    varied, fixed = varied_in(context.meta["flags"])
    file, sets = context.meta["file"], context.meta["sets"]

    def load(more: Sequence[str]) -> Settings:
        return load_settings(fixed, [*sets, *more], file=file, command="sweep")

    trials = trials_of(methods, varied_by([*varied, *(vary or [])]))
    result = run_sweep(load, trials, output, progress=begin_work())
    say_once(result.text())
    if result.failures:
        failed = f"{len(result.failures)} of {len(result.ended)} runs failed."
        raise UsageError(failed)
