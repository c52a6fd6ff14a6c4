"""The commands: options become a config, the pipeline does the work, the result is printed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from .schemas.config import Config

app = typer.Typer(
    name="align",
    help="Preference alignment in two stages: score the reference once, then train at will.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Config file [default: align.yaml here or beside the data]."),
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any setting: SECTION.NAME=VALUE.")]
Data = Annotated[list[str] | None, typer.Argument(help="Files or folders of preference data.")]
Model = Annotated[str | None, typer.Option("--model", help="Folder of the reference model.")]
CacheDir = Annotated[Path, typer.Argument(help="A cache made by precompute-ref.")]


def main() -> None:
    """Runs one command; a person's mistake is one message, never a traceback."""
    from .schemas.errors import AlignError, Interrupted

    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        app()
    except (AlignError, Interrupted) as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}. Check the disk and its permissions.", 74)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("align.yaml"),
) -> None:
    """Write an align.yaml with every setting, its default and what it means."""
    from .pipeline.settings import template
    from .schemas.errors import UsageError

    if path.exists():
        raise UsageError(f"{path} exists. Remove it first, or name another file.")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such folder. Make it first, or name another file.")
    path.write_text(template(), encoding="utf-8")
    typer.echo(f"{path} written. Set model.path in it, then: align precompute-ref data.parquet")


@app.command()
def config(data: Data = None, config: ConfigFile = None, sets: Sets = None) -> None:
    """Print every setting and where its value comes from."""
    from .pipeline.settings import flatten, load_settings, redacted

    settings = load_settings({}, sets or [], file=config, data=data or [])
    typer.echo("# Later wins: default, config file, environment (ALIGN_MODEL), flag, --set")
    for name, value in flatten(settings.config).items():
        typer.echo(f"{name} = {redacted(value)!r}  ({settings.origins.get(name, 'default')})")


@app.command("precompute-ref")
def precompute_ref(
    data: Data = None,
    model: Model = None,
    adapter: Annotated[str | None, typer.Option(help="PEFT adapter on top of it.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder of the cache.")] = None,
    kl_pairs: Annotated[
        int | None, typer.Option(min=0, help="Mismatched completions per completion.")
    ] = None,
    token_logps: Annotated[
        bool | None, typer.Option("--token-logps/--no-token-logps", help="Keep every token's.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens in all.")] = None,
    max_prompt_length: Annotated[
        int | None, typer.Option(min=0, help="Tokens in a prompt; 0: no limit of its own.")
    ] = None,
    tokens_per_batch: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a batch, padding included.")
    ] = None,
    rows_per_shard: Annotated[int | None, typer.Option(min=1, help="Rows in a shard.")] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        typer.Option(help="Precision of the reference."),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"] | None, typer.Option(help="Where.")] = None,
    seed: Annotated[int | None, typer.Option(help="Orders rows, chooses KL partners.")] = None,
    column_map: Annotated[
        list[str] | None, typer.Option("--map", help="Our column=yours: prompt=question.")
    ] = None,
    max_bad_frac: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of unusable rows allowed.")
    ] = None,
    reuse: Annotated[
        list[str] | None, typer.Option(help="Another cache to copy scores from; repeatable.")
    ] = None,
    join: Annotated[bool, typer.Option("--join", help="Work beside a run on this output.")] = False,
    mlflow: Annotated[
        bool | None, typer.Option("--mlflow/--no-mlflow", help="Record the run.")
    ] = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Run the frozen reference over preference data and store its log-probs in Parquet shards."""
    from .pipeline.settings import load_settings, parse_map

    flags = {
        "model.path": model,
        "model.adapter": adapter,
        "model.dtype": dtype,
        "model.device": device,
        "data.map": parse_map(column_map) if column_map else None,
        "data.max_bad_frac": max_bad_frac,
        "tokens.max_length": max_length,
        "tokens.max_prompt_length": max_prompt_length,
        "cache.output": output,
        "cache.kl_pairs": kl_pairs,
        "cache.token_logps": token_logps,
        "cache.seed": seed,
        "cache.rows_per_shard": rows_per_shard,
        "cache.reuse": reuse or None,
        "scoring.tokens_per_batch": tokens_per_batch,
        "tracking.mlflow": mlflow,
    }
    settings = load_settings(flags, sets or [], file=config, data=data or [])
    _precompute(settings.config, join=join)


@app.command()
def verify(
    cache: CacheDir,
    model: Model = None,
    rescore: Annotated[int, typer.Option(min=0, help="Rows to score again; 0: none.")] = 16,
) -> None:
    """Check every digest of a cache, and score a sample of rows again with the reference."""
    from .pipeline.verify import verify as run_verify
    from .stages.model.reference import HfReference

    typer.echo(run_verify(cache, model=model, rescore=rescore, open_reference=HfReference))


@app.command()
def inspect(
    cache: CacheDir,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a cache holds: rows, lengths, truncation, balance, log-probs, drops."""
    from .schemas.codec import to_json
    from .stages.report.summary import summarize
    from .stages.report.tables import render
    from .stages.storage.layout import CacheFolder

    summary = summarize(CacheFolder(cache))
    typer.echo(to_json(summary).rstrip() if as_json else render(summary))


@app.command()
def export(
    cache: CacheDir,
    to: Annotated[Literal["trl"], typer.Option(help="Whose column names to use.")] = "trl",
    output: Annotated[
        Path | None, typer.Option(help="File [default: CACHE/../CACHE-trl.parquet].")
    ] = None,
    model: Model = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
) -> None:
    """Write a cache as one flat Parquet file for other trainers."""
    from .pipeline.export import export as run_export

    target = output or cache.resolve().with_name(f"{cache.resolve().name}-{to}.parquet")
    rows = run_export(cache, target, model=model, overwrite=overwrite)
    typer.echo(f"{target}: {rows:,} rows")


@app.command("tiny-world")
def tiny_world(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    rows: Annotated[int, typer.Option(min=1, help="Preference rows.")] = 2000,
    seed: Annotated[int, typer.Option(help="Another seed, another world.")] = 0,
) -> None:
    """Make a tiny tokenizer, language model and preference data set to try align on."""
    from .stages.world.world import make_world

    world = make_world(folder, rows=rows, seed=seed)
    typer.echo(f"model  {world.model}\ndata   {world.data.paired}")


def _precompute(config: Config, *, join: bool) -> None:
    from .pipeline.precompute import precompute
    from .pipeline.units import Worker
    from .schemas.errors import UsageError
    from .stages.model.reference import HfReference
    from .stages.tracking.console import make_progress

    if not config.model.path:
        raise UsageError(
            "No reference model. Pass --model DIR, set ALIGN_MODEL, or run `align init` and set "
            "model.path in align.yaml."
        )
    world = _launched_as("WORLD_SIZE", default=1)
    worker = Worker(_launched_as("RANK", default=0), world, joins=join or world > 1)
    outcome = precompute(config, HfReference(config.model), progress=make_progress(), worker=worker)
    typer.echo(outcome.text())


def _launched_as(variable: str, *, default: int) -> int:
    """What torchrun and its like say about this process among its peers."""
    from .schemas.errors import UsageError

    value = os.environ.get(variable) or str(default)
    if not value.isdecimal() or int(value) < default:
        raise UsageError(f"{variable} is {value!r}, not a whole number. Correct or unset it.")
    return int(value)


def _stop(signal_number: int, _: Any) -> NoReturn:
    from .schemas.errors import Interrupted

    # A second signal must end the program at once, whatever it is doing.
    signal.signal(signal_number, signal.SIG_DFL)
    raise Interrupted(signal_number)


def _fail(message: str, exit_code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    sys.exit(exit_code)
