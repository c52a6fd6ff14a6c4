"""The commands that train, or say what a training needs: run, train, plan and sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...schemas.errors import UsageError
from ..options.flags import ConfigFile, Data, Sets, fixed_in, varied_in, with_flags
from ..options.method_flags import MethodCommand
from .terminal import begin_work, say, say_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..options.settings import Settings
    from ..plan.planned_rows import GivenRows
    from ..plan.run_plan import PlanRequest

GIB = 2**30


def add_training_to(app: typer.Typer) -> None:
    """Makes them commands of the app."""
    for command in (run, train, plan, sweep):
        app.command(cls=MethodCommand, rich_help_panel="Training")(command)


@with_flags("train")
def train(
    flags: dict[str, Any],
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Train a policy on the shards of a cache; the reference is never loaded."""
    from ..options.first_checks import require_training
    from ..options.settings import load_settings

    settings = load_settings(flags, sets or [], file=config, command="train")
    require_training(settings.config)
    from ..train.training_job import open_training

    job = open_training(settings)
    from ..train.train import run_training

    say_once(run_training(job, progress=begin_work()).text())


@with_flags("run")
def run(
    flags: dict[str, Any],
    data: Data = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Show no row as the model reads it.")
    ] = False,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Score the reference over preference data and train on it: both stages in one command.

    --model is the reference, and where the policy begins unless --policy names another.

    The cache stays: the next run on the same data scores nothing.
    """
    from ..options.first_checks import asked_recipe, require_inputs, require_policy
    from ..options.settings import load_settings

    given = load_settings(flags, sets or [], file=config, data=data or [], command="run")
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


@with_flags("plan")
def plan(
    flags: dict[str, Any],
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
    tokens_per_second: Annotated[
        float,
        typer.Option(min=0, metavar="<float>", help="The speed of all GPUs, for time and cost."),
    ] = 0.0,
    like: Annotated[
        Path | None, typer.Option("--like", help="A run whose measured speed is taken.")
    ] = None,
    price: Annotated[
        float, typer.Option(min=0, metavar="<float>", help="Of a GPU for an hour.")
    ] = 0.0,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Say what a training needs before it begins: steps, tokens, memory of each GPU, time, cost."""
    from ..options.settings import load_settings
    from ..plan.plan_text import plan_text
    from ..plan.run_plan import PlanRequest, plan_run
    from ..plan.setting_checks import bytes_of

    settings = load_settings(flags, sets or [], file=config, command="plan")
    asked: PlanRequest = PlanRequest(
        gpu_bytes=bytes_of(gpu, name="--gpu", least=GIB),
        gpus=gpus or 1,
        is_for_gpu=bool(gpu or gpus),
        rows=_given_rows(rows, prompt_tokens, completion_tokens),
        tokens_per_second=_speed(tokens_per_second, like, price),
        price=price,
    )
    say_once(plan_text(plan_run(settings, asked)))


def _speed(tokens_per_second: float, like: Path | None, price: float) -> float:
    """Tokens per second, as given or as a run measured it; 0: unknown."""
    from ..plan.run_plan import rate_of

    if like and tokens_per_second:
        raise UsageError("--like and --tokens-per-second both give a speed. Leave out one of them.")
    if price and not (like or tokens_per_second):
        raise UsageError("--price needs a speed: pass --tokens-per-second, or --like RUN.")
    return rate_of(like) if like else tokens_per_second


def _given_rows(rows: int | None, prompt: int | None, completion: int | None) -> GivenRows | None:
    from ..plan.planned_rows import GivenRows

    if rows:
        return GivenRows(rows, prompt or 300, completion or 300)
    if prompt or completion:
        raise UsageError("--prompt-tokens and --completion-tokens are of --rows, which is missing.")
    return None


@with_flags("sweep")
def sweep(
    flags: dict[str, Any],
    methods: Annotated[list[str], typer.Option("--method", help="A method; repeatable.")],
    vary: Annotated[
        list[str] | None, typer.Option(help="SETTING=V1,V2,… to try; repeatable.")
    ] = None,
    output: Annotated[
        str, typer.Option(help="Each run gets a folder in it.", metavar="<path>")
    ] = "align-sweep",
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Train many methods and settings on one cache, and compare them in one table.

    A flag with several values, as --lr 1e-6,1e-5, tries each of them.
    """
    from ...stages.methods.table import recipe_of
    from ..options.settings import load_settings

    for method in methods:
        recipe_of(method, {})  # refused before torch is imported
    from ..train.sweep import sweep as run_sweep
    from ..train.trials import trials_of, varied_by

    def load(more: Sequence[str]) -> Settings:
        return load_settings(fixed, [*(sets or []), *more], file=config, command="sweep")

    fixed = fixed_in(flags)
    trials = trials_of(methods, varied_by([*varied_in(flags), *(vary or [])]))
    result = run_sweep(load, trials, output, progress=begin_work())
    say_once(result.text())
    if result.failures:
        failed = f"{len(result.failures)} of {len(result.results)} runs failed."
        raise UsageError(failed)
