"""`align sweep`: trains every combination of methods and settings on one cache, one by one."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ...schemas.errors import AlignError, UsageError, counted, log_failure
from ...stages.engine.distributed import joined_world, naming_lost_peers, run_on_rank_zero
from ...stages.methods.table import objective_of
from ...stages.storage.disk import fs
from ...stages.storage.locations import origin_of, require_on_disk
from ...stages.storage.output_folder import OutputFolder
from ...stages.storage.run.run_folder import RunFolder
from ...stages.tracking.progress import Progress
from ...stages.tracking.run import Run as TrackedRun
from ...stages.tracking.run import recorded, tagged
from ...stages.tracking.run_record import GROUP_TAG, TRIAL_TAG
from ...stages.tracking.run_texts import description, run_name
from ..options.settings import Settings, flatten, instead_of
from ..options.settings_table import fields, reads
from .load import identify
from .records import data_of
from .run_diff import ranking
from .setup import Run, check
from .sweep_result import PAGE, Sweep, Trial, page_of
from .train import train_in

Load = Callable[[Sequence[str]], Settings]

MOST_TRIALS = 10_000


def sweep(load: Load, trials: Sequence[Trial], folder: str, *, progress: Progress) -> Sweep:
    """Trains one run after another; `load` returns the settings with additional --set texts.

    A single process continues after a failed run. Several ranks stop, because a failure may have
    happened on some of them only.
    """
    output = require_on_disk(folder, "a sweep is")
    tracking, runs = load(()).config.tracking, _checked(load, trials, output)
    # The common settings of all runs distinguish the sweep from others.
    policies, data = {run.begins_as.path for run in runs}, {data_of(run) for run in runs}
    facts = {
        name: values.pop() if len(values) == 1 else ""
        for name, values in (("policy", policies), ("data", data))
    }
    result = Sweep(output, trials, facts)

    with joined_world() as world:
        for trial, run in zip(trials, runs, strict=True):
            with naming_lost_peers(world), _naming(trial):
                identify(run, world)
        run_on_rank_zero(world, partial(_prepare, output, runs))
        tracking = tracking if world.rank == 0 else tracking.none()
        name = run_name(facts["policy"], "sweep", facts["data"])
        with recorded(tracking, output, "sweep", name=name) as parent:
            _describe(parent, result, runs)
            for number, trial in enumerate(trials, 1):
                progress.log(f"run {number} of {len(trials)}: {trial.name}")
                tags = {GROUP_TAG: str(output.resolve()), TRIAL_TAG: trial.name}
                try:
                    with tagged(tags, parent):
                        # Removed from the list, so that a finished run does not keep its policy.
                        _train(trial, runs.pop(0), progress)
                except AlignError as error:
                    progress.log(f"{trial.name} failed: {error}")
                    trial.ending, trial.failure = "failed", str(error)
                    if world.size > 1:
                        if world.rank == 0:  # without `run_on_rank_zero`: others may have ended
                            _publish(result, parent)
                        raise
                run_on_rank_zero(world, partial(_publish, result, parent))
            run_on_rank_zero(world, partial(_compare, result, parent))
            if result.failures:
                parent.finish("FAILED")
    return result


def _checked(load: Load, trials: Sequence[Trial], output: Path) -> list[Run]:
    """The runs; refuses a --set that every run overrides, and two equal runs."""
    origins = load(()).origins
    varied = {text.partition("=")[0] for trial in trials for text in trial.settings}
    for name in sorted(varied):
        if origins.get(name) == "--set":
            raise UsageError(f"--set {name}: the sweep sets it in every run. Use only --vary.")
    runs: list[Run] = []
    for trial in trials:
        with _naming(trial):
            runs.append(check(load((*trial.settings, f"train.output={output / trial.name}"))))
    require_different(runs)
    return runs


@contextmanager
def _naming(trial: Trial) -> Iterator[None]:
    try:
        yield
    except AlignError as error:
        raise type(error)(f"{trial.name}: {error}") from error


def require_different(runs: Sequence[Run]) -> None:
    """Refuses equal values that are written differently, such as 0.1 and 0.10."""
    known: dict[frozenset[tuple[str, Any]], str] = {}
    for run in runs:
        settings = {**flatten(run.config), "train.output": ""}
        values = frozenset(
            (name, repr(value) if isinstance(value, list | dict) else value)
            for name, value in settings.items()
        )
        name = Path(run.config.train.output).name
        other = known.setdefault(values, name)
        if other != name:
            raise UsageError(f"{other} and {name} would be the same run. Leave one of them out.")


def _prepare(output: Path, runs: Sequence[Run]) -> None:
    OutputFolder(output, "sweep").prepare()
    fs.drop_drafts(output / PAGE)
    for run in runs:
        if run.config.train.resume == "never":
            run.folder.require_new()


def _train(trial: Trial, run: Run, progress: Progress) -> None:
    started = time.monotonic()
    trained = train_in(run, progress)
    if trained.is_old:
        progress.log(f"{trial.name} is finished already")
    else:
        trial.seconds = time.monotonic() - started
    trial.ending, trial.steps, trial.measured = trained.ending, trained.steps, trained.measured


def _describe(parent: TrackedRun, result: Sweep, runs: Sequence[Run]) -> None:
    """Records the varied settings, and the caches of the runs."""
    varied: dict[str, dict[str, None]] = {}  # values in their order, each once
    for trial in result.trials:
        for text in trial.settings:
            name, _, value = text.partition("=")
            varied.setdefault(name, {})[value] = None
    group = str(result.folder.resolve())
    texts = "; ".join(f"{name}={','.join(values)}" for name, values in varied.items())
    parent.set_tags({GROUP_TAG: group, "align.varied": texts})
    params = {name: ", ".join(values) for name, values in varied.items()}
    parent.log_params(params)
    sentence = f"{counted(len(runs), 'trainings')}, each in a run of its own."
    parent.describe(description(sentence, {"sweep": group, **result.facts, **params}))
    for root, run in {run.manifest.root: run for run in runs}.items():
        cache = run.cache.root.resolve()
        source = origin_of(str(cache))
        parent.log_dataset(cache.name, digest=root, source=source, context="training")


def _publish(result: Sweep, parent: TrackedRun) -> None:
    with log_failure(f"No {PAGE}"):
        fs.publish(result.folder / PAGE, page_of(result).encode())
        parent.log_artifact(result.folder / PAGE)
    if result.failures:
        failures = "\n".join(f"{trial.name}: {trial.failure}" for trial in result.failures)
        parent.set_tags({"align.failed": failures})


def _compare(result: Sweep, parent: TrackedRun) -> None:
    """Publishes the ranking of the runs."""
    trained = {trial.name: trial for trial in result.ended if not trial.failure}
    with log_failure("No comparison of the runs"):
        best, result.ranking = ranking({name: RunFolder(result.folder / name) for name in trained})
        _publish(result, parent)
        if best:
            parent.set_tags({"align.ahead": best})
            parent.log_metrics(trained[best].measured.after, step=trained[best].steps)


def varied_by(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parses `--vary method.beta=0.05,0.1`; refuses settings given twice or set by the sweep."""
    varied: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if name in fields() and not reads("sweep", name):
            advice = instead_of(name, "sweep")
            raise UsageError(f"--vary: {name} is not used by `align sweep`. {advice}.")
        if name in varied:
            raise UsageError(f"{name} is varied twice. Give all of its values at once.")
        if not (name and equals and all(values.split(","))):
            raise UsageError(
                f"--vary {text}: write SETTING=V1,V2, for example method.beta=0.05,0.1."
            )
        varied[name] = values.split(",")
    return varied


def trials_of(methods: Sequence[str], varied: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Every combination; each method gets only its own options."""
    objectives = {method: objective_of(method, {}) for method in methods}
    for key in varied:
        section, _, option = key.partition(".")
        has_it = (option in objective.option_names for objective in objectives.values())
        if section == "method" and not any(has_it):
            raise UsageError(f"{key}: none of {', '.join(methods)} has it. See `align methods`.")
    trials: dict[str, Trial] = {}  # by lower-case names: some file systems ignore case
    for method, objective in objectives.items():
        own = {
            key: values
            for key, values in varied.items()
            if not key.startswith("method.")
            or key.removeprefix("method.") in objective.option_names
        }
        if len(trials) + math.prod(map(len, own.values())) > MOST_TRIALS:
            raise UsageError(
                f"--vary: more than {MOST_TRIALS:,} runs. Leave out some of the values."
            )
        for values in itertools.product(*own.values()):
            chosen = [f"{key}={value}" for key, value in zip(own, values, strict=True)]
            name = re.sub(r"[^\w.+-]", "_", "-".join((objective.name, *values)))
            trial = Trial(name, (f"train.method={method}", *chosen))
            other = trials.setdefault(name.casefold(), trial)
            if other is not trial:
                raise UsageError(
                    f"{' '.join(other.settings)} and {' '.join(trial.settings)} would both be the "
                    f"run {name}. Leave one of them out."
                )
    return [*trials.values()]
