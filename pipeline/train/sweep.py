"""Trains every combination of methods and settings on one cache, one after the other."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...schemas.errors import AlignError, Interrupted, UsageError, counted, log_failure
from ...stages.engine.distributed import joined_world, naming_lost_peers, run_on_rank_zero
from ...stages.methods.table import recipe_of
from ...stages.storage.copies import origin_of
from ...stages.storage.disk import fs
from ...stages.storage.locations import require_on_disk
from ...stages.storage.output_folder import OutputFolder
from ...stages.tracking import journaled_run
from ...stages.tracking.journaled_run import tagged
from ...stages.tracking.progress import Progress
from ...stages.tracking.run_texts import description, run_name
from ...stages.tracking.tracker import GROUP_TAG, TRIAL_TAG
from ..jobs.signals import WAY_ON
from ..options.settings import Settings, flatten
from ..options.table import INSTEAD
from ..work import recorded_work
from .load import identify
from .records import data_of
from .run_diff import standing
from .setup import Run, check
from .sweep_result import PAGES, SweepResult, Trial, TrialResult, varied_in
from .train import train_in

Load = Callable[[Sequence[str]], Settings]

MOST_TRIALS = 10_000


def sweep(load: Load, trials: Sequence[Trial], folder: str, *, progress: Progress) -> SweepResult:
    """Trains one run after another; `load` gives the settings of a run from further --set texts.

    A single process continues after a run that failed; ranks may not agree that it failed.
    """
    output = require_on_disk(folder, "a sweep is")
    given = load(())
    _require_free(given, trials)
    runs: list[Run] = []
    for trial in trials:
        with _naming(trial):
            runs.append(check(load((*trial.settings, f"train.output={output / trial.name}"))))
    require_different(runs)
    policies, data = {run.begins_as.path for run in runs}, {data_of(run) for run in runs}
    facts = {
        "policy": policies.pop() if len(policies) == 1 else "",
        "data": data.pop() if len(data) == 1 else "",
    }
    result = SweepResult(output, tuple(trials), facts=facts)
    with joined_world() as world:
        for trial, run in zip(trials, runs, strict=True):
            with naming_lost_peers(world), _naming(trial):
                identify(run, world)
        run_on_rank_zero(world, partial(_prepare, output, runs))
        tracking = given.config.tracking if world.rank == 0 else given.config.tracking.none()
        name = run_name(facts["policy"], "sweep", facts["data"])
        with recorded_work(tracking, output, "sweep", name=name) as parent:
            _describe(parent, result, runs)
            for number, trial in enumerate(trials, 1):
                progress.say(f"run {number} of {len(trials)}: {trial.name}")
                # Taken out of the list: a run that is over must not keep its policy.
                with (
                    tagged({GROUP_TAG: str(output.resolve()), TRIAL_TAG: trial.name}, parent),
                    _add_resume_hint(result),
                ):
                    ended = _try(trial, runs.pop(0), progress)
                result = replace(result, ended=(*result.ended, ended))
                if world.size == 1 or not ended.error:
                    run_on_rank_zero(world, partial(_publish, result, parent))
                    continue
                if world.rank == 0:  # not `run_on_rank_zero`: the others may have ended
                    _publish(result, parent)
                raise ended.error
            result = run_on_rank_zero(world, partial(_compared, result, parent))
            if result.failures:
                parent.finish("FAILED")
    return result


def _require_free(given: Settings, trials: Sequence[Trial]) -> None:
    """Refuses a --set that every run would override."""
    for name in varied_in(trials):
        if given.origins.get(name) == "--set":
            raise UsageError(f"--set {name}: the sweep sets it in every run. Use --vary alone.")


@contextmanager
def _naming(trial: Trial) -> Iterator[None]:
    try:
        yield
    except AlignError as error:
        raise type(error)(f"{trial.name}: {error}") from error


def require_different(runs: Sequence[Run]) -> None:
    """Refuses values that are written differently but are equal, as 0.1 and 0.10."""
    known: dict[frozenset[tuple[str, Any]], str] = {}
    for config in [run.config for run in runs]:
        settings = {**flatten(config), "train.output": ""}
        values = frozenset(
            (name, repr(value) if isinstance(value, list | dict) else value)
            for name, value in settings.items()
        )
        name = Path(config.train.output).name
        if (other := known.setdefault(values, name)) != name:
            raise UsageError(f"{other} and {name} would be the same run. Leave one of them out.")


def _prepare(output: Path, runs: Sequence[Run]) -> None:
    OutputFolder(output, "sweep").prepare()
    for name in PAGES:
        fs.drop_drafts(output / name)
    for run in runs:
        if run.config.train.resume == "never":
            run.folder.require_new()


@contextmanager
def _add_resume_hint(result: SweepResult) -> Iterator[None]:
    try:
        yield
    except Interrupted as stop:
        over = f"{len(result.ended)} of {len(result.planned)} runs of the sweep"
        said = f"{over} in {result.folder} are over. {WAY_ON}"
        raise Interrupted(stop.signal_number, said, at=stop.at) from None


def _try(trial: Trial, run: Run, progress: Progress) -> TrialResult:
    began = time.monotonic()
    try:
        trained = train_in(run, progress)
    except AlignError as error:
        progress.say(f"{trial.name} failed: {error}")
        return TrialResult(trial, error=error)
    if trained.is_old:
        progress.say(f"{trial.name} is finished already and is not changed")
        return TrialResult(trial, trained)
    return TrialResult(trial, trained, seconds=time.monotonic() - began)


# What is recorded of a sweep, beside its runs.


def _describe(parent: journaled_run.Run, result: SweepResult, runs: Sequence[Run]) -> None:
    varied = varied_in(result.planned)
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


def _publish(result: SweepResult, parent: journaled_run.Run) -> None:
    result.folder.mkdir(parents=True, exist_ok=True)
    for name, text in PAGES.items():
        with log_failure(f"No {name}"):
            fs.publish(result.folder / name, f"{text(result)}\n".encode())
            parent.log_artifact(result.folder / name)
    if result.failures:
        failures = "\n".join(f"{one.trial.name}: {one.error}" for one in result.failures)
        parent.set_tags({"align.failed": failures})


def _compared(result: SweepResult, parent: journaled_run.Run) -> SweepResult:
    """Publishes the results of all runs, and which of them is ahead."""
    trained = [one for one in result.ended if one.trained]
    with log_failure("No comparison of the runs"):
        found = standing({one.trial.name: one.trained.folder for one in trained if one.trained})
        result = replace(result, standing=found.said)
        _publish(result, parent)
        for one in trained:
            if one.trained and one.trial.name == found.best:
                parent.set_tags({"align.ahead": found.best})
                parent.log_metrics(one.measured.after, step=one.trained.steps)
    return result


# The trials that follow from what is varied.


def varied_by(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parses `--vary method.beta=0.05,0.1`; refuses what is given twice or set by the sweep."""
    varied: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if instead := INSTEAD["sweep"].get(name):
            raise UsageError(f"--vary {name}: a sweep does not take it. Use {instead}.")
        if name in varied:
            raise UsageError(f"{name} is varied twice. Give all of its values at once.")
        if not (name and equals and all(values.split(","))):
            raise UsageError(
                f"--vary {text}: expected SETTING=V1,V2, for example method.beta=0.05,0.1."
            )
        varied[name] = values.split(",")
    return varied


def trials_of(methods: Sequence[str], varied: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Every combination; an option that a method does not have is left out for it."""
    recipes = {method: recipe_of(method, {}) for method in methods}
    for key in varied:
        section, _, option = key.partition(".")
        has_it = (option in recipe.option_names for recipe in recipes.values())
        if section == "method" and not any(has_it):
            raise UsageError(f"{key}: none of {', '.join(methods)} has it. See `align methods`.")
    trials: list[Trial] = []
    for method, recipe in recipes.items():
        own = {
            key: values
            for key, values in varied.items()
            if not key.startswith("method.") or key.removeprefix("method.") in recipe.option_names
        }
        if len(trials) + math.prod(map(len, own.values())) > MOST_TRIALS:
            raise UsageError(
                f"--vary: more than {MOST_TRIALS:,} runs. Leave out some of the values."
            )
        for values in itertools.product(*own.values()):
            chosen = [f"{key}={value}" for key, value in zip(own, values, strict=True)]
            name = re.sub(r"[^\w.+-]", "_", "-".join((recipe.name, *values)))
            trials.append(Trial(name, (f"train.method={method}", *chosen)))
    known: dict[str, Trial] = {}
    for trial in trials:
        other = known.setdefault(trial.name.casefold(), trial)  # some file systems ignore the case
        if other is not trial:
            raise UsageError(
                f"{' '.join(other.settings)} and {' '.join(trial.settings)} would both be the "
                f"run {trial.name}. Leave one of them out."
            )
    return trials
