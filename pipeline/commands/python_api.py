"""The Python API of `import align`: caches and runs as frames, both stages as functions.

Each function imports its modules when it is called, changes no global setting of the process, and
raises AlignError where the command fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import polars as pl

    from ...schemas.checkpoint import RunStatus
    from ...stages.tracking.metrics_log import Callback
    from ...stages.tracking.progress import Progress
    from ..options.settings import Settings
    from ..precompute.precompute import PrecomputeResult

AnyPath: TypeAlias = "str | Path"
Frame: TypeAlias = Any  # of polars, pandas or Arrow


def load_cache(path: AnyPath, *, text: bool = False) -> pl.LazyFrame:
    """A finished cache as a lazy frame with TRL's column names, like the file of `align export`.

    A pair, a labelled completion or a scored group is one row. Only the columns of a query are
    read. With `text`, the reference's tokenizer is loaded and `prompt`, `chosen`, … come before
    their ids.

        >>> cache = align.load_cache("align-cache")
        >>> cache.select(pl.col("ref_chosen_logps") - pl.col("ref_rejected_logps")).collect()
    """
    from ...stages.report.export_trl import scan_trl
    from ..jobs.object_inputs import cache_at

    folder = cache_at(str(path))
    if not text:
        return scan_trl(folder)
    from ..precompute.export import text_of

    return scan_trl(folder, text_of(folder))


def precompute(
    data: AnyPath | Sequence[AnyPath] | Iterable[Mapping[str, Any]] | Frame,
    *,
    model: AnyPath | None = None,
    output: AnyPath | None = None,
    settings: Mapping[str, Any] | None = None,
    config: AnyPath | None = None,
    progress: bool = True,
) -> PrecomputeResult:
    """Makes or finishes a cache like `align precompute-ref`; `.folder` is its path.

    The data are files, or rows: a list of dicts, a `datasets.Dataset`, a polars, pandas or Arrow
    frame. `settings` takes the names of `--set`, with values instead of text. As in the command, an
    `align.yaml` here or beside the data is read unless `config` names another file.

        >>> made = align.precompute("pairs.parquet", model="models/sft", output="align-cache",
        ...                         settings={"tokens.max_length": 1024})
        >>> made.folder, made.manifest.rows, made.counts.scored
    """
    from ...stages.data.given_rows import files_of
    from ..precompute.precompute import make_cache

    flags = {"model.path": model, "cache.output": output}
    with files_of(data) as files:
        loaded = _loaded("precompute-ref", flags, settings, config, data=files)
        return make_cache(loaded.config, progress=_progress(shown=progress))


def train(
    method: str,
    *,
    cache: AnyPath | None = None,
    output: AnyPath | None = None,
    model: AnyPath | None = None,
    settings: Mapping[str, Any] | None = None,
    config: AnyPath | None = None,
    callbacks: Iterable[Callback] = (),
    progress: bool = True,
) -> TrainingRun:
    """Trains a policy on a cache like `align train`; returns the run, read from its folder.

    On the first rank, each callback gets the step and the numbers of every line of metrics.jsonl.
    An exception in a callback ends the run; `settings={"train.resume": "auto"}` continues it.

        >>> def watch(step, metrics):
        ...     print(step, metrics.get("loss"), metrics.get("eval/loss"))
        >>> run = align.train("kto", cache="align-cache", output="runs/kto", callbacks=[watch],
        ...                   settings={"train.lr": 5e-7, "train.eval_fraction": 0.05})
        >>> run.metrics["loss"].tail(1)
    """
    from ..train.setup import check
    from ..train.train import train as run_training

    named = {"train.cache": cache, "train.output": output, "train.model": model}
    asked = _loaded("train", {"train.method": method, **named}, settings, config)
    trained = run_training(check(asked, callbacks), progress=_progress(shown=progress))
    return load_run(trained.folder.root)


@dataclass(frozen=True)
class TrainingRun:
    """A training run, read from its folder."""

    folder: Path
    ending: RunStatus | None  # None while it runs, or if it was killed
    steps: int  # the last step in the metrics
    model: Path | None  # the folder of the trained policy, once the run is finished
    metrics: pl.DataFrame = field(repr=False)  # step, time, and a column per metric
    evaluations: pl.DataFrame = field(repr=False)  # the same on held-out rows: eval/…
    samples: pl.DataFrame = field(repr=False)  # single completions of each evaluation
    answers: pl.DataFrame = field(repr=False)  # to held-out prompts, before and after training
    rows: pl.DataFrame = field(repr=False)  # margins of training rows, with train.row_margins
    settings: dict[str, Any] = field(repr=False)  # all settings, by dotted name


def load_run(path: AnyPath) -> TrainingRun:
    """Reads the folder of a training run, which may still be running.

    >>> run = align.load_run("runs/kto")
    >>> run.evaluations.select("step", "eval/loss", "eval/rewards/margins")
    """
    import polars as pl

    from ...stages.report.eval_table import read_answers, read_samples
    from ...stages.report.row_margins import read_margins
    from ...stages.storage.run.run_folder import read_ending
    from ..options.settings import read_yaml
    from ..train.run_history import read_history
    from ..train.run_report import training_folder

    folder = training_folder(Path(path))
    ending, history = read_ending(folder), read_history(folder.metrics)
    samples = [
        read_samples(path).select(pl.lit(step, pl.Int64).alias("step"), pl.all())
        for step, path in folder.evaluations().items()
    ]
    return TrainingRun(
        folder=folder.root,
        ending=ending.ending if ending else None,
        steps=history.steps,
        model=folder.model if folder.model.is_dir() else None,
        metrics=history.learned,
        evaluations=history.held_out,
        samples=pl.concat([pl.DataFrame(schema={"step": pl.Int64}), *samples], how="diagonal"),
        answers=read_answers(folder.answers),
        rows=read_margins(folder.rows),
        settings=read_yaml(folder.config),
    )


def _loaded(
    command: str,
    flags: Mapping[str, AnyPath | None],
    settings: Mapping[str, Any] | None,
    config: AnyPath | None,
    data: Sequence[AnyPath] = (),
) -> Settings:
    from ..options.settings import load_settings

    return load_settings(
        {name: str(value) for name, value in flags.items() if value is not None},
        {name: str(v) if isinstance(v, Path) else v for name, v in (settings or {}).items()},
        file=Path(config) if config else None,
        data=[str(file) for file in data],
        command=command,
    )


def _progress(*, shown: bool) -> Progress:
    import sys

    from ...stages.tracking.progress import Progress

    return Progress(sys.stderr if shown else None)
