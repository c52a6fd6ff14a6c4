"""The commands: each builds a config, runs the pipeline and prints its result."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .pipeline.commands.cache_commands import add_looking_to
from .pipeline.commands.examples import complete_help
from .pipeline.commands.round_commands import add_to
from .pipeline.commands.setup_commands import add_setup_to
from .pipeline.commands.terminal import (
    SafeGroup,
    Version,
    begin_work,
    own_process,
    print_result,
    recorded_by_first,
    say,
)
from .pipeline.commands.train_commands import add_training_to
from .pipeline.jobs.signals import stop_signals, stop_with_launcher
from .pipeline.options.flags import ConfigFile, Data, Part, Sets, with_flags

app = typer.Typer(
    name="align",
    cls=SafeGroup,
    help="Preference alignment in two stages: score the reference once, then train at will.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs one command; a person's mistake is one message, never a traceback."""
    from .schemas.errors import AlignError, Interrupted, PeerError, unexpected_os_error

    # transformers would fetch code for some layers from the Hub, and run it.
    os.environ["USE_HUB_KERNELS"] = "0"
    own_process(sys.argv)
    stop_with_launcher()
    for number in stop_signals():
        signal.signal(number, _stop)
    try:
        # The deepspeed launcher names the rank before the command; LOCAL_RANK holds it too.
        words = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]
        app(words, prog_name="align")
    except PeerError as error:
        say(f"error: {error}", err=True)
        # Threads of the lost collective are still there: the usual way out would abort on them.
        os._exit(error.exit_code)
    except (AlignError, Interrupted) as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader of the output has ended
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        _fail(str(refusal := unexpected_os_error(error)), refusal.exit_code)
    except Exception:
        import traceback

        # Python would print it by itself, and the secrets in it.
        say(traceback.format_exc().rstrip(), err=True)
        sys.exit(1)
    finally:
        # What runs while Python ends would print an Interrupted and go on.
        for number in stop_signals():
            if signal.getsignal(number) is _stop:  # else a second one ends it anyway
                signal.signal(number, _end)


@app.callback()
def about(version: Version = False) -> None:
    """Takes what is asked of no command."""


add_setup_to(app)


@app.command("precompute-ref", rich_help_panel="Data and cache")
@with_flags("precompute-ref")
def precompute_ref(
    flags: dict[str, Any],
    data: Data = None,
    part: Part = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Show no row as the model reads it.")
    ] = False,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Run the frozen reference over preference data and store its log-probs in Parquet shards."""
    from .pipeline.options.first_checks import require_inputs
    from .pipeline.options.settings import load_settings

    loaded = load_settings(
        flags, sets or [], file=config, data=data or [], command="precompute-ref"
    )
    given = loaded.config
    require_inputs(given)
    from .pipeline.jobs.object_inputs import with_local_inputs
    from .pipeline.parts import part_of
    from .pipeline.precompute.opening import require_model
    from .pipeline.precompute.precompute import precompute
    from .stages.model.reference import HfReference
    from .stages.storage.disk.digests import own_digests

    own_part = part_of(part, os.environ)
    require_model(given, own_part)
    local = with_local_inputs(given)
    recorded = recorded_by_first(local)
    reference, progress = HfReference(local.model, own_digests()), begin_work()
    print_result(
        precompute(recorded, reference, progress=progress, part=own_part, shows_row=not quiet)
    )


@app.command(rich_help_panel="Data and cache")
@with_flags("score")
def score(
    flags: dict[str, Any],
    data: Data = None,
    part: Part = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Score completions with a reward model, and write the data with its scores."""
    from .pipeline.options.settings import load_settings
    from .pipeline.parts import part_of
    from .pipeline.tables.score_rewards import rewards_from_model
    from .schemas.errors import UsageError

    given = load_settings(flags, sets or [], file=config, data=data or [], command="score").config
    if not given.rewards.model:
        raise UsageError("No reward model. Pass --reward-model DIR.")
    from .stages.model.reward_model import HfReward
    from .stages.storage.disk.digests import own_digests

    own_part = part_of(part, os.environ)
    print_result(
        rewards_from_model(
            recorded_by_first(given),
            lambda options: HfReward(options, own_digests()),
            progress=begin_work(),
            part=own_part,
        )
    )


add_looking_to(app)
add_to(app)
add_training_to(app)


@app.command(rich_help_panel="Look")
def methods(
    name: Annotated[str | None, typer.Argument(help="One of them, to be explained.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as the README has it.")
    ] = False,
) -> None:
    """List the methods with their losses and options, or explain one."""
    from .stages.methods.method_docs import markdown_table, plain_table, render_method, render_table
    from .stages.methods.table import METHODS, find_method

    chosen = [find_method(name)] if name else list(METHODS.values())
    if as_json:
        say(json.dumps(plain_table(chosen), indent=2, ensure_ascii=False))
    elif markdown:
        say(markdown_table(chosen).rstrip())
    else:
        say((render_method(chosen[0]) if name else render_table(chosen)).rstrip())


@app.command(rich_help_panel="Look")
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
        from .pipeline.train.run_answers import answer_again

        page = answer_again(
            run, count=answers, most_tokens=answer_tokens, config=config, progress=begin_work()
        )
    else:
        from .pipeline.train.run_report import training_folder, write_report

        write_report(run)
        page = training_folder(run).report
    say(f"{page} written. It needs no network: open it in any browser.")


@app.command(rich_help_panel="Look")
def diff(
    run_a: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    run_b: Annotated[Path, typer.Argument(help="Folder of another one.")],
    step: Annotated[
        int | None, typer.Option(help="Compare after this step (default: each one's last).")
    ] = None,
) -> None:
    """Compare two runs row by row: which held-out rows flip, and whether chance explains it."""
    from .pipeline.train.run_diff import diff_runs

    say(diff_runs(run_a, run_b, step).text())


@app.command(rich_help_panel="Look")
def register(
    run: Annotated[Path, typer.Argument(help="Folder of a finished training run.")],
    name: Annotated[str, typer.Argument(help="Name of the model in MLflow's registry.")],
    alias: Annotated[
        str, typer.Option(help="Alias that from now on is this version, for example champion.")
    ] = "",
    uri: Annotated[
        str, typer.Option(help="Another store than your own, even if the run names it.")
    ] = "",
    config: ConfigFile = None,
) -> None:
    """Upload the trained model of a run to MLflow and make it a version of a registered model."""
    from .pipeline.jobs.tracker_sync import own_options
    from .pipeline.train.register import register as register_model

    made = register_model(run, own_options(run, config), name=name, alias=alias, uri=uri)
    known = "" if made.is_new else ", as it was before"
    named = f"; {alias} is this version" if alias else ""
    say(f"{run} is version {made.number} of {made.name}{known}{named}.")


@app.command("mlflow-sync", rich_help_panel="Look")
def mlflow_sync(
    run: Annotated[Path, typer.Argument(help="Folder of a training run, sweep, scores or cache.")],
    uri: Annotated[
        str, typer.Option(help="Another store than your own, even if the run names it.")
    ] = "",
    config: ConfigFile = None,
) -> None:
    """Tell trackers, as MLflow, what they missed of a run; telling them twice changes nothing."""
    from .pipeline.jobs.tracker_sync import own_options, sync_runs
    from .schemas.errors import counted

    for synced in sync_runs(run, own_options(run, config), uri=uri):
        sent = f"{counted(synced.points_sent, 'numbers')} sent"
        say(f"{synced.uri}: run {synced.run_id} is {synced.status}\n{sent}")


complete_help(app)


def _stop(signal_number: int, _: Any) -> NoReturn:
    from .schemas.errors import Interrupted

    # A second signal must end the program at once, in any state.
    signal.signal(signal_number, signal.SIG_DFL)
    raise Interrupted(signal_number)


def _end(signal_number: int, _: Any) -> NoReturn:
    os._exit(128 + signal_number)


def _fail(message: str, exit_code: int) -> NoReturn:
    say(f"error: {message}", err=True)
    sys.exit(exit_code)
