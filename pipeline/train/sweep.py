"""Trains many methods and settings on one cache, and compares them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...schemas.batches import World
from ...schemas.errors import AlignError, Interrupted, UsageError, counted, log_failure
from ...stages.engine.distributed import joined_world, naming_lost_peers, run_on_rank_zero
from ...stages.feed.cache_index import ShardColumns
from ...stages.storage.cache.cache_folder import OutputFolder
from ...stages.storage.copies import origin_of
from ...stages.storage.disk import fs
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.locations import require_on_disk
from ...stages.storage.run.run_folder import RunFolder
from ...stages.tracking.journaled_run import Run, tagged
from ...stages.tracking.progress import Progress
from ...stages.tracking.run_texts import description, model_name, run_name
from ...stages.tracking.tracker import GROUP_TAG, TRIAL_TAG
from ..jobs.signals import WAY_ON
from ..options.settings import Settings, flatten
from ..options.table import SETS
from ..work import recorded_work
from .policy_identity import PolicyDigests, digest_policies
from .run_description import data_of
from .run_diff import standing
from .sweep_page import sweep_page
from .train import shard_columns, train_in
from .training_job import TrainingJob, open_training
from .trials import SweepResult, Trial, TrialResult, values_of

Load = Callable[[Sequence[str]], Settings]

PAGES = ("sweep.json", "sweep.txt", "sweep.html")


def sweep(load: Load, trials: Sequence[Trial], folder: str, *, progress: Progress) -> SweepResult:
    """Trains one run after another; `load` gives the settings of a run from further --set texts.

    A single process continues after a run that failed; ranks may not agree that it failed.
    """
    output = require_on_disk(folder, "a sweep is")
    given = load(())
    tracking = given.config.tracking
    _require_free(given, trials)
    jobs = [_open(load, trial, output) for trial in trials]
    require_different(jobs)
    results: list[TrialResult] = []
    known = {"model": model_name(_policy_of(jobs)), "data": _data_of(jobs)}
    facts = {name: value for name, value in known.items() if value}
    begun = SweepResult(output, (), planned=tuple(trials), facts=facts)
    remember = own_digests()
    with joined_world() as world:
        with naming_lost_peers(world):
            digests = digest_policies(jobs, world, remember)
        jobs = [_identified(digests, *one) for one in zip(trials, jobs, strict=True)]
        columns = shard_columns(world, remember, keeps=True)
        run_on_rank_zero(world, partial(_prepare_folder, jobs, output))
        with (
            _add_resume_hint(output, results, len(jobs)),
            recorded_work(
                tracking if world.rank == 0 else tracking.none(),
                output,
                "sweep",
                name=run_name(_policy_of(jobs), "sweep", _data_of(jobs)),
            ) as parent,
            _page_if_stopped(begun, results, world, parent),
        ):
            _describe(parent, trials, jobs, output)
            run_on_rank_zero(world, partial(_publish_page, begun, parent))
            for trial, job in zip(trials, jobs, strict=True):
                progress.say(f"run {len(results) + 1} of {len(trials)}: {trial.name}")
                tags = {GROUP_TAG: _group(output), TRIAL_TAG: trial.name}
                with tagged(tags, parent):
                    results.append(_try(trial, job, world, columns, progress))
                _report(replace(begun, results=tuple(results)), world, parent)
            ended = replace(begun, results=tuple(results))
            result = run_on_rank_zero(world, partial(_compared, ended, parent))
            if any(one.error for one in results):
                parent.finish("FAILED")
    return result


def _require_free(given: Settings, trials: Sequence[Trial]) -> None:
    """Refuses a --set that every run would override."""
    own = SETS["sweep"]
    for name in (*own, *values_of(trials)):
        if given.origins.get(name) == "--set":
            way = own.get(name, "--vary")
            raise UsageError(f"--set {name}: the sweep sets it in every run. Use {way} alone.")


def _open(load: Load, trial: Trial, output: Path) -> TrainingJob:
    with _naming(trial):
        return open_training(load((*trial.settings, f"train.output={output / trial.name}")))


def _identified(digests: PolicyDigests, trial: Trial, job: TrainingJob) -> TrainingJob:
    with _naming(trial):
        return digests.identified(job)


@contextmanager
def _naming(trial: Trial) -> Iterator[None]:
    try:
        yield
    except AlignError as error:
        raise type(error)(f"{trial.name}: {error}") from error


def require_different(jobs: Sequence[TrainingJob]) -> None:
    """Refuses values that are written differently but are equal, as 0.1 and 0.10."""
    known: dict[frozenset[tuple[str, Any]], str] = {}
    for config in [job.config for job in jobs]:
        settings = {**flatten(config), "train.output": ""}
        values = frozenset(
            (name, repr(value) if isinstance(value, list | dict) else value)
            for name, value in settings.items()
        )
        name = Path(config.train.output).name
        if (other := known.setdefault(values, name)) != name:
            raise UsageError(f"{other} and {name} would be the same run. Leave one of them out.")


def _prepare_folder(jobs: Sequence[TrainingJob], output: Path) -> None:
    OutputFolder(output, "sweep").prepare()
    for name in PAGES:
        fs.drop_drafts(output / name)
    for job in jobs:
        if job.config.train.resume == "never":
            RunFolder(Path(job.config.train.output)).require_new()


@contextmanager
def _add_resume_hint(output: Path, results: Sequence[TrialResult], total: int) -> Iterator[None]:
    try:
        yield
    except Interrupted as stop:
        done = f"{len(results)} of {total} runs of the sweep in {output} are over"
        raise Interrupted(stop.signal_number, f"{done}. {WAY_ON}", at=stop.at) from None


@contextmanager
def _page_if_stopped(
    begun: SweepResult, results: Sequence[TrialResult], world: World, parent: Run
) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if world.rank == 0:  # not `run_on_rank_zero`: the others may have ended
            _publish_page(replace(begun, results=tuple(results), is_stopped=True), parent)
        raise


def _describe(
    parent: Run, trials: Sequence[Trial], jobs: Sequence[TrainingJob], output: Path
) -> None:
    varied = values_of(trials)
    varied_values = "; ".join(f"{name}={','.join(values)}" for name, values in varied.items())
    parent.set_tags({GROUP_TAG: _group(output), "align.varied": varied_values})
    params = {name: ", ".join(values) for name, values in varied.items()}
    parent.log_params(params)
    facts = {"sweep": _group(output), "policy": _policy_of(jobs), "data": _data_of(jobs)}
    sentence = f"{counted(len(trials), 'trainings')}, each in a run of its own."
    parent.describe(description(sentence, {**facts, **params}))
    for root, job in {job.manifest.root: job for job in jobs}.items():
        cache = job.cache.root.resolve()
        source = origin_of(str(cache))
        parent.log_dataset(cache.name, digest=root, source=source, context="training")


def _policy_of(jobs: Sequence[TrainingJob]) -> str:
    """The policy that all begin with, empty if they differ."""
    first, *others = {job.policy.path for job in jobs}
    return "" if others else first


def _data_of(jobs: Sequence[TrainingJob]) -> str:
    """The data of all, empty if they differ."""
    first, *others = {data_of(job) for job in jobs}
    return "" if others else first


def _group(output: Path) -> str:
    return str(output.resolve())


def _try(
    trial: Trial, job: TrainingJob, world: World, columns: ShardColumns, progress: Progress
) -> TrialResult:
    began = time.monotonic()
    try:
        trained = train_in(job, world, columns, progress=progress)
        if trained.is_old:
            progress.say(f"{trial.name} is finished already and is not changed")
            return TrialResult(trial, trained)
        return TrialResult(trial, trained, seconds=time.monotonic() - began)
    except AlignError as error:
        progress.say(f"{trial.name} failed: {error}")
        return TrialResult(trial, error=error)


def _report(result: SweepResult, world: World, parent: Run) -> None:
    """Publishes what is done so far; among ranks a failure is published and then ends the sweep."""
    error = result.results[-1].error
    if not error or world.size == 1:
        run_on_rank_zero(world, partial(_publish, result, parent))
        return
    if world.rank == 0:  # not `run_on_rank_zero`: the others may have ended
        _publish(result, parent)
    raise error


def _publish(result: SweepResult, parent: Run) -> None:
    result.folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("sweep.json", result.as_json()), ("sweep.txt", result.text())):
        fs.publish(result.folder / name, f"{text}\n".encode())
        parent.log_artifact(result.folder / name)
    if result.failures:
        failures = "\n".join(f"{one.trial.name}: {one.error}" for one in result.failures)
        parent.set_tags({"align.failed": failures})
    _publish_page(result, parent)


def _compared(result: SweepResult, parent: Run) -> SweepResult:
    """Publishes the results of all runs, and which of them is ahead."""
    names = [one.trial.name for one in result.results if one.trained]
    folders = {name: RunFolder(result.folder / name) for name in names}
    with log_failure("No comparison of the runs"):
        found = standing(folders)
        result = replace(result, standing=found.said)
        _publish(result, parent)
        for one in result.results:
            if one.trained and one.trial.name == found.best:
                parent.set_tags({"align.ahead": found.best})
                parent.log_metrics(one.measured.after, step=one.trained.steps)
    return result


def _publish_page(result: SweepResult, parent: Run) -> None:
    target = result.folder / "sweep.html"
    with log_failure("No page of the sweep"):
        fs.publish(target, sweep_page(result).encode())
        parent.log_artifact(target)
