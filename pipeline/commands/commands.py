"""Every command: its arguments, checks before torch is imported, and one call.

A command imports its modules when it runs, so --help and refusals take less than a second.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from ... import __version__
from ...schemas.errors import UsageError, closest, counted, did_you_mean
from .flags import ConfigFile, SettingsCommand, settings_of, shared_work, takes_several
from .terminal import SafeGroup, begin_work, echo, echo_once, echo_result, echo_row

if TYPE_CHECKING:
    from ..options.settings import Settings

app = typer.Typer(
    name="align",
    cls=SafeGroup,
    help="Preference alignment in two stages: score the reference once, then train many times.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def command(panel: str, example: str) -> Callable[..., Any]:
    """Registers a function as the command of its example, in a panel of `align --help`.

    A function with a context parameter has settings: a flag for each, --config and --set.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        cls = SettingsCommand if "context" in function.__annotations__ else TyperCommand
        epilog = f"Example: {example}"
        made = app.command(example.split()[1], cls=cls, rich_help_panel=panel, epilog=epilog)
        return made(function)

    return add


def argument(meaning: str, default: Any = ..., **more: Any) -> Any:
    """A positional argument; required unless it has a default."""
    return typer.Argument(default, help=meaning, **more)


def option(meaning: str, default: Any = None, *words: str, **more: Any) -> Any:
    """A flag that is not a setting, named like the parameter unless `words` are given."""
    return typer.Option(default, *words, help=meaning, **more)


# Parameters of several commands.
Data = Annotated[list[str] | None, typer.Argument(help="Files or folders of preference data.")]
CacheDir = Annotated[str, typer.Argument(help="A cache made by precompute-ref.")]
RunDir = Annotated[Path, typer.Argument(help="Folder of a training run.")]


def _model(given: str | None) -> str | None:
    """The folder of a model, or an address for an `owner/name` without a folder here."""
    from ...stages.storage.locations import address_of

    return given and address_of(given, "model")


Model = Annotated[
    str | None,
    typer.Option("--model", help="The reference model: a folder, or OWNER/NAME.", callback=_model),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Do not show an example row.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Uri = Annotated[str, typer.Option(help="Another store than in your settings.")]
Part = Annotated[
    str | None,
    typer.Option("--part", metavar="<i/n>", help="Do part I of N; other processes do the rest."),
]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        echo(__version__)
        raise typer.Exit


@app.callback()
def about(
    version: bool = option(
        "Print the version.", False, "--version", callback=_print_version, is_eager=True
    ),
) -> None:
    """Handles the flags without a command."""


@command("Begin", "align init --method kto --schema")
def init(
    path: Path = argument("Where to write it.", Path("align.yaml")),
    schema: bool = option("Also write align.schema.json, for editors.", False, "--schema"),
    method: str = option("Include this method and its options.", "", metavar="<name>"),
    recipe: str = option(
        "Only the settings of a common case: kto-8b-lora-24gb, …; another word lists them.",
        "",
        metavar="<name>",
    ),
) -> None:
    """Write an align.yaml with every setting, its default and its meaning, or a recipe."""
    from ...schemas.config import Config
    from ...schemas.json_codec import json_schema
    from ...stages.storage.disk import fs
    from ..options import settings

    if recipe and method:
        raise UsageError("--recipe and --method are both given. A recipe has its method.")
    chosen = None
    if method:
        from ...stages.methods.table import find_method

        chosen = find_method(method)
    text = settings.recipe(recipe) if recipe else settings.template(chosen)
    if path.exists():
        raise UsageError(f"{path} exists. Remove it first, or name another file.")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such folder. Make it first, or name another file.")
    if schema:
        beside = path.with_name("align.schema.json")
        with fs.new_file(beside, replaces=True) as file:
            file.write(json.dumps(json_schema(Config), indent=2).encode() + b"\n")
        text = f"# yaml-language-server: $schema={beside.name}\n{text}"
    with fs.new_file(path, replaces=False) as file:
        file.write(text.encode())
    echo(f"{path} written. Set model.path in it.")
    echo("next: the commands at its head" if recipe else "next: align precompute-ref data.parquet")


@command("Begin", "align config --changed")
def config(
    context: typer.Context,
    data: Data = None,
    changed: bool = option("Only settings that differ from their default.", False, "--changed"),
) -> None:
    """Print every setting and the source of its value."""
    from ...schemas.config import Config
    from ..options.settings import flatten, without_secrets

    settings = settings_of(context, data=data)
    if options := settings.config.method:  # importing the methods takes time
        from ...stages.methods.table import options_of_all

        known = options_of_all()
        for name in options:
            last = name.rpartition(".")[2]
            if last not in known:
                near = did_you_mean(closest(last, known))
                raise UsageError(f"method.{name:.60}: no method has such an option.{near}")
    echo("# Later wins: default, config file, environment (ALIGN_MODEL), flag, --set")
    found, defaults = flatten(settings.config), flatten(Config())
    for name, value in without_secrets(found).items():
        if not (changed and name in defaults and found[name] == defaults[name]):
            echo(f"{name} = {value!r}  ({settings.origins.get(name, 'default')})")


@command("Begin", "align tiny-world world --rows 200")
def tiny_world(
    folder: Path = argument("A new folder."),
    rows: int = option("Preference rows.", 2000, min=1),
    seed: int = option("Seed of the random model and data.", 0),
) -> None:
    """Make a tiny tokenizer, language model and preference data set, to try align."""
    from ...stages.demo.tiny_world import make_world

    make_world(folder, rows=rows, seed=seed)
    model, data = folder / "model", folder / "data" / "paired.parquet"
    echo(f"model  {model}\ndata   {data}\nnext: align precompute-ref {data} --model {model}")


@command("Data and cache", "align precompute-ref data.jsonl --model DIR --token-logps")
def precompute_ref(
    context: typer.Context, data: Data = None, part: Part = None, quiet: Quiet = False
) -> None:
    """Run the frozen reference over preference data and store its log-probs in Parquet shards."""
    from ..options.first_checks import require_inputs

    config, own_part = shared_work(context, part, data=data)
    require_inputs(config)
    from ..precompute.precompute import make_cache

    echo_result(make_cache(config, progress=begin_work(), part=own_part, shows_row=not quiet))


@command("Data and cache", "align import-ref data.jsonl --logps FILE --model DIR")
def import_ref(
    context: typer.Context,
    data: Data = None,
    logps: str = option("Table of log-probs: a file, or a folder of `datasets`.", ..., "--logps"),
    rescore: int = option("Rows whose log-probs are first scored again.", 64, min=1),
    part: Part = None,
) -> None:
    """Make a cache of log-probs that another trainer wrote; the reference scores what is missing.

    The table has token ids, as TRL's tokenized data, or one row for each row of the data.
    """
    from ..options.first_checks import require_inputs

    config, own_part = shared_work(context, part, data=data)
    require_inputs(config)
    from ..precompute.precompute import make_cache

    progress = begin_work()
    echo_result(make_cache(config, progress=progress, part=own_part, logps=logps, rescore=rescore))


@command("Data and cache", "align score data.jsonl --reward-model DIR")
def score(context: typer.Context, data: Data = None, part: Part = None) -> None:
    """Score completions with a reward model, and write the data with its scores."""
    config, own_part = shared_work(context, part, data=data)
    if not config.rewards.model:
        raise UsageError("No reward model. Pass --reward-model DIR.")
    from ..tables.score_rewards import open_reward_model, rewards_from_model

    echo_result(rewards_from_model(config, open_reward_model, progress=begin_work(), part=own_part))


@command("Data and cache", "align check data.jsonl --model DIR")
def check(context: typer.Context, data: Data = None) -> None:
    """Show how data are read: their format, rows as a model reads them, and rejected rows."""
    from ..jobs.object_inputs import with_local_inputs
    from ..precompute.check_data import check_data

    local = with_local_inputs(settings_of(context, data=data).config, weights=False)
    checked = check_data(local, progress=begin_work())
    for line in checked.lines():
        echo_row(line)
    checked.dropped.require_few()


@command("Data and cache", "align verify align-cache --rescore 64")
def verify(
    context: typer.Context,
    cache: CacheDir,
    model: Model = None,
    rescore: int = option("Number of rows to score again; 0: none.", 16, min=0),
    server: str = option("Address of a server to compare with the model, on these rows.", ""),
    adapter: str = option("With --server: the model's adapter.", "", callback=_model),
) -> None:
    """Check every digest of a cache, and score a sample of its rows again, or by a server."""
    from ...stages.model.reference import HfReference
    from ..precompute.verify import verify as run_verify

    if adapter and not server:
        raise UsageError("--adapter needs --server: the cache names its own adapter. Remove it.")
    config, alone = settings_of(context, near=[cache]).config, 0 if server else rescore
    echo(run_verify(cache, config.model, model=model, rescore=alone, open_reference=HfReference))
    if server:
        from ..tables.verify_server import verify_server

        echo(verify_server(config, cache, server, model=model, adapter=adapter, rows=rescore))


@command("Data and cache", "align inspect align-cache --row data.jsonl:17")
def inspect(
    cache: CacheDir,
    as_json: Json = False,
    row: str | None = option("Show this row: FILE:ROW, or the start of an id."),
    rejected: bool = option("List the rejected rows and the reasons.", False, "--rejected"),
    model: Model = None,
) -> None:
    """Show the content of a cache: rows, lengths, truncation, balance, log-probs, rejected rows."""
    from ..jobs.object_inputs import cache_at
    from ..precompute.inspect_rows import lines_of_inspection

    for line in lines_of_inspection(
        cache_at(cache), row=row, rejected=rejected, as_json=as_json, model=model
    ):
        echo_row(line)


@command("Data and cache", "align export align-cache --output pairs.parquet")
def export(
    cache: CacheDir,
    to: Literal["trl"] = option("The trainer whose column names to use.", "trl"),
    output: Path | None = option("File (default: CACHE/../CACHE-trl.parquet)."),
    model: Model = None,
    overwrite: bool = option("Replace the file if it exists.", False),
) -> None:
    """Write a cache as one flat Parquet file: text, ids and log-probs, with TRL's column names.

    TRL 1.16 reads only the text. It takes no reference log-probs from a file: remove the ref_
    columns before you pass precompute_ref_log_probs.
    """
    from ..jobs.object_inputs import cache_at
    from ..precompute.export import beside
    from ..precompute.export import export as run_export

    folder = cache_at(cache)
    target = output or beside(folder, to)
    rows = run_export(folder.root, target, model=model, overwrite=overwrite)
    echo(f"{target}: {counted(rows, 'rows')}")


@command("Rounds", "align sample prompts.jsonl --model DIR -n 4")
def sample(
    context: typer.Context,
    prompts: list[str] | None = argument("Files or folders with prompts.", None),
    part: Part = None,
) -> None:
    """Sample completions of prompts from a policy; stored samples are not drawn again."""
    from ..tables.sample import sample as run_sample

    config, own_part = shared_work(context, part, data=prompts)
    echo_result(run_sample(config, progress=begin_work(), part=own_part))


@command("Rounds", "align judge align-samples --by reward --reward-model DIR")
def judge(
    context: typer.Context,
    samples: str | None = argument("A folder made by `align sample`; none with --calibrate.", None),
    calibrate: str | None = option("Preference data, to measure how often the judge agrees."),
    part: Part = None,
) -> None:
    """Judge samples: by a reward model, a language model, or a check of their answers."""
    from ..tables.judge import calibrate as run_calibrate
    from ..tables.judge import judge as run_judge

    if (samples is None) == (calibrate is None):
        raise UsageError("Name either a folder of samples to judge, or data with --calibrate.")
    if calibrate and part:
        raise UsageError("--part and --calibrate exclude each other. Remove one of them.")
    config, own_part = shared_work(context, part, near=[samples or calibrate or ""])
    if samples is not None:
        echo_result(run_judge(config, samples, progress=begin_work(), part=own_part))
    elif calibrate is not None:
        echo(run_calibrate(config, calibrate, progress=begin_work()).text())


@command("Rounds", "align select align-judged --rows labels")
def select(
    context: typer.Context,
    judged: str = argument("A folder made by `align judge`, or a file with scores."),
) -> None:
    """Make preference data from judged samples: pairs, labels, or groups with scores."""
    from ..tables.select_rows import select as run_select

    echo(run_select(settings_of(context, near=[judged]).config, judged).text())


@command("Rounds", "align rounds align.yaml")
def rounds(
    context: typer.Context,
    config: Path = argument("An align.yaml with the settings of all rounds."),
) -> None:
    """Repeat sample, judge, select, precompute-ref and train, each round on the last policy."""
    from ..rounds.rounds import run_rounds

    echo(run_rounds(settings_of(context, file=config), progress=begin_work()))


@command("Training", "align run data.jsonl --model DIR --method kto --lora --lr 1e-5")
def run(context: typer.Context, data: Data = None, quiet: Quiet = False) -> None:
    """Score preference data with the reference and train on it: both stages in one command.

    --model is the reference; the policy also starts from it unless --policy names another model.

    The cache stays: the next run on the same data reuses it.
    """
    from ..options.first_checks import asked_objective, require_inputs, require_model

    given = settings_of(context, data=data)
    asked_objective(given.config)
    require_inputs(given.config)
    require_model(given.config.train.model, "Pass the policy with --policy DIR.")
    from ..precompute.precompute import make_cache
    from ..train.both_stages import settings_of_both, train_on_cache

    settings = settings_of_both(given)
    progress = begin_work()
    made = make_cache(settings.config, progress=progress, shows_row=not quiet)
    # Stage 1's "next" line is left out, because this command trains next.
    echo("\n".join(line for line in made.text().splitlines() if not line.startswith("next: ")))
    echo(train_on_cache(settings, progress=progress).text())


@command("Training", "align train --method dpo --beta 0.1 --lr 1e-6 --eval-fraction 0.05")
def train(context: typer.Context) -> None:
    """Train a policy on the shards of a cache; the reference is never loaded."""
    from ..options.first_checks import require_training

    settings = settings_of(context)
    require_training(settings.config)
    from ..train.setup import check as check_training

    checked = check_training(settings)
    from ..train.train import train as run_training

    echo_once(run_training(checked, progress=begin_work()).text())


@command("Training", "align plan --method kto --gpu 24g --lora")
def plan(
    context: typer.Context,
    gpu: str = option("Memory of a GPU: 24g, 48g, 80g, or bytes.", ""),
    gpus: int | None = option("Number of GPUs (default 1).", min=1, metavar="<int>"),
    rows: int | None = option("Without a cache: number of pairs.", min=1, metavar="<int>"),
    prompt_tokens: int | None = option(
        "With --rows: tokens of a prompt (default 300).", min=1, metavar="<int>"
    ),
    completion_tokens: int | None = option(
        "With --rows: tokens of a completion (default 300).", min=1, metavar="<int>"
    ),
) -> None:
    """Estimate a training's steps, tokens, and memory on each GPU."""
    from ..plan.run_plan import plan_run, plan_text
    from ..plan.setting_checks import bytes_of
    from ..plan.workload import GivenRows

    settings = settings_of(context)
    if (prompt_tokens or completion_tokens) and not rows:
        raise UsageError("--prompt-tokens and --completion-tokens need --rows N. Add it.")
    planned = plan_run(
        settings,
        gpu_bytes=bytes_of(gpu, name="--gpu", least=2**30),
        ranks=gpus or 1,
        is_for_gpu=bool(gpu or gpus),
        given=GivenRows(rows, prompt_tokens or 300, completion_tokens or 300) if rows else None,
    )
    echo_once(plan_text(planned))


@command("Training", "align sweep --method dpo --method kto --lr 1e-6,1e-5")
def sweep(
    context: typer.Context,
    methods: list[str] = option("A method to train; repeatable.", ..., "--method"),
    vary: list[str] | None = option("SETTING=V1,V2,… to try; repeatable."),
    output: str = option("Each run gets a folder in it.", "align-sweep", metavar="<path>"),
) -> None:
    """Train many methods and settings on one cache, and compare them in one table.

    A flag with several values, such as --lr 1e-6,1e-5, tries each of them.
    """
    from ...stages.methods.table import objective_of
    from ..options.settings import load_settings

    for method in methods:
        objective_of(method, {})
    from ..train.sweep import sweep as run_sweep
    from ..train.sweep import trials_of, varied_by

    # A method's option with one value is also varied, as each method takes only its own options.
    flags, file, sets = context.meta["flags"], context.meta["file"], context.meta["sets"]
    varied = {
        name: value
        for name, value in flags.items()
        if takes_several(name) and ("," in value or name.startswith("method."))
    }
    fixed = {name: value for name, value in flags.items() if name not in varied}

    def load(more: Sequence[str]) -> Settings:
        # Settings that a sweep sets itself are refused elsewhere.
        command = "train" if more else "sweep"
        return load_settings(fixed, [*sets, *more], file=file, command=command)

    texts = [f"{name}={value}" for name, value in varied.items()]
    trials = trials_of(methods, varied_by([*texts, *(vary or [])]))
    result = run_sweep(load, trials, output, progress=begin_work())
    echo_once(result.text())
    if result.failures:
        raise UsageError(f"{len(result.failures)} of {len(result.ended)} runs failed.")


@command("Look", "align methods kto")
def methods(
    name: str | None = argument("The method to explain.", None),
    as_json: Json = False,
    markdown: bool = option("Print a Markdown table.", False, "--markdown"),
) -> None:
    """List the methods with their losses and options, or explain one."""
    from ...stages.methods import method_docs
    from ...stages.methods.table import METHODS, find_method

    chosen = [find_method(name)] if name else list(METHODS.values())
    if as_json:
        echo(json.dumps([*map(method_docs.describe, chosen)], indent=2, ensure_ascii=False))
    elif markdown:
        echo(method_docs.markdown_table(chosen).rstrip())
    elif name:
        echo(method_docs.render_method(chosen[0]).rstrip())
    else:
        echo(method_docs.render_table(chosen).rstrip())


@command("Look", "align report align-run")
def report(
    run: RunDir,
    answers: int = option("Prompts to answer before and after; 0: none.", 0, min=0),
    answer_tokens: int = option("Maximum tokens of an answer.", 128, min=1),
    config: ConfigFile = None,
) -> None:
    """Write report.html of a training run: curves, held-out completions, lineage.

    With --answers, the initial policy and the trained one are loaded, one after the other.
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
    echo(f"{page} written. It needs no network: open it in any browser.")


@command("Look", "align evaluate align-run --cache other-cache")
def evaluate(
    context: typer.Context,
    model: str = argument("A finished run's folder, a model's, or OWNER/NAME.", callback=_model),
    tasks: str = option("Tasks of lm-evaluation-harness: hellaswag,mmlu,…", ""),
    harness: str = option("More words for it, such as '--num_fewshot 5 --limit 100'.", ""),
    output: Path | None = option("Folder of a model's results (default: align-evaluation)."),
    as_json: Json = False,
) -> None:
    """Measure a model on held-out rows, as training does, and on tasks of lm-evaluation-harness.

    A run is measured on its own held-out rows unless caches are named; a model needs --method.
    """
    from ...stages.report.text_tables import grid
    from ..jobs.tracker_sync import own_options
    from ..train.evaluate import evaluate as run_evaluation
    from ..train.run_report import results_table

    own = Path(model) / "config.yaml"
    of_run = own.exists()
    if (harness and not tasks) or (output and of_run):
        raise UsageError("--harness is for --tasks, and --output for a model. Leave it out.")
    tracking = own_options(context.meta["file"])  # a run's folder names no store
    settings = settings_of(context, file=own if of_run else None)
    home = Path(model) / "evaluated" if of_run else output or Path("align-evaluation")
    words = [tasks, *shlex.split(harness)] if tasks else []
    results = run_evaluation(settings, model, home, words, tracking, begin_work())
    head, *rows = results_table(results) or [[""]]
    text = "\n".join([*grid(head, rows), f"results in {home / 'results.json'}"])
    echo_once(json.dumps(results, indent=2, default=str) if as_json else text)


@command("Look", "align diff runs/dpo runs/kto")
def diff(
    run_a: RunDir,
    run_b: Path = argument("Folder of another training run."),
    step: int | None = option("Compare after this step (default: the last of each)."),
) -> None:
    """Compare two runs row by row: which held-out rows flip, and whether that is significant."""
    from ..train.run_diff import diff_runs

    echo(diff_runs(run_a, run_b, step).text())


@command("Look", "align register align-run prefs --alias champion")
def register(
    run: Path = argument("Folder of a finished training run."),
    name: str = argument("Name of the model in MLflow's registry."),
    alias: str = option("Alias to give to this version, for example champion.", ""),
    uri: Uri = "",
    config: ConfigFile = None,
) -> None:
    """Register the trained model of a run in MLflow, as a new version of a model."""
    from ..jobs.tracker_sync import own_options
    from ..train.register import register as register_model

    number, is_new = register_model(run, own_options(config), name=name, alias=alias, uri=uri)
    known = "" if is_new else ", registered before"
    named = f"; the alias {alias} names this version" if alias else ""
    echo(f"{run} is version {number} of {name}{known}{named}.")


@command("Look", "align push align-run you/prefs")
def push(
    run: Path = argument("Folder of a finished training run."),
    name: str = argument("Repository on the Hugging Face Hub: OWNER/NAME."),
    public: bool = option("Anyone may read it; else it is private.", False, "--public"),
    revision: str = option("Branch, made from main if there is none.", "main", metavar="<name>"),
    message: str = option("Message of the commit.", "", metavar="<text>"),
) -> None:
    """Upload the trained model of a run, with its card, to the Hugging Face Hub."""
    from ..train.push import push as push_model

    for line in push_model(run, name, public=public, branch=revision, message=message):
        echo(line)


@command("Look", "align mlflow-sync align-run")
def mlflow_sync(
    run: Path = argument("Folder of a training run, sweep, scores or cache."),
    uri: Uri = "",
    config: ConfigFile = None,
) -> None:
    """Upload pending data of a run to MLflow and other trackers; repeating it is harmless."""
    from ..jobs.tracker_sync import own_options, sync_runs

    for synced in sync_runs(run, own_options(config), uri=uri):
        sent = f"{counted(synced.numbers_sent, 'numbers')} sent"
        echo(f"{synced.uri}: run {synced.run_id} is {synced.status}\n{sent}")
