"""Many runs over one cache: the reference was paid for once."""

from __future__ import annotations

import itertools
import json
import logging
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..schemas.errors import AlignError, UsageError
from ..stages.engine.launch import joined_world
from ..stages.engine.peers import from_first
from ..stages.methods.table import recipe_of
from ..stages.report.grid import grid
from ..stages.storage import fs
from .recording import recorded
from .train import train_in
from .trained import EVAL
from .training_job import open_training

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ..schemas.engine import World
    from ..schemas.tracking import Progress, Run
    from .settings import Settings
    from .trained import Trained

logger = logging.getLogger("align")

# What stands above a column, and the metric in it.
HEADS = {"loss": "loss", "acc.": "rewards/accuracies", "margin": "rewards/margins"}


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its name, and the settings that tell it from the others."""

    name: str
    settings: tuple[str, ...]  # NAME=VALUE, as --set takes them


@dataclass(frozen=True)
class Tried:
    """What came of one run."""

    trial: Trial
    trained: Trained | None
    failure: str = ""


def trials_of(methods: Sequence[str], varied: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Every combination; an option that a method does not have is left out for it."""
    options = {name: recipe_of(name, {}).values for name in methods}
    for key in varied:
        section, _, option = key.partition(".")
        if section == "method" and not any(option in known for known in options.values()):
            raise UsageError(f"{key}: none of {', '.join(methods)} has it. See `align methods`.")
    trials = []
    for name, known in options.items():
        own = {
            key: values
            for key, values in varied.items()
            if not key.startswith("method.") or key.removeprefix("method.") in known
        }
        for values in itertools.product(*own.values()):
            chosen = [f"{key}={value}" for key, value in zip(own, values, strict=True)]
            short = [re.sub(r"[^\w.+-]", "_", value) for value in values]
            trials.append(Trial("-".join([name, *short]), (f"train.method={name}", *chosen)))
    return trials


def sweep(
    load: Callable[[Sequence[str]], Settings],
    trials: Sequence[Trial],
    output: Path,
    *,
    progress: Progress,
) -> Swept:
    """Trains one after another; `load` gives the settings of a run from what --set would add.

    Alone a process goes on after a run that failed; ranks cannot, for they may not agree on it.
    """
    tracking = load(()).config.tracking
    tried: list[Tried] = []
    with (
        joined_world() as world,
        recorded(tracking, name="sweep", is_recorded=world.rank == 0) as parent,
    ):
        for trial in trials:
            progress.say(f"run {len(tried) + 1} of {len(trials)}: {trial.name}")
            settings = load((*trial.settings, f"train.output={output / trial.name}"))
            tried.append(_try(trial, settings, world, parent.run_id, progress))
        swept = Swept(output, tuple(tried))
        from_first(world, lambda: _publish(swept, parent))
    return swept


@dataclass(frozen=True)
class Swept:
    """All runs of a sweep, in the order they were made."""

    folder: Path
    tried: tuple[Tried, ...]

    @property
    def failures(self) -> list[Tried]:
        """Runs that did not come to their end."""
        return [one for one in self.tried if one.failure]

    def text(self) -> str:
        """One table for a person."""
        head = ["held-out rows", *(f"{name} {when}" for name in HEADS for when in ("from", "to"))]
        table = grid(head, [_cells(one) for one in self.tried])
        failed = [f"{one.trial.name} failed: {one.failure}" for one in self.failures]
        return "\n".join([*table, *failed, f"in {self.folder}"])


def _try(trial: Trial, settings: Settings, world: World, parent: str, progress: Progress) -> Tried:
    tags = {"mlflow.parentRunId": parent} if parent else {}
    try:
        job = replace(open_training(settings), tags=tags)
        return Tried(trial, train_in(job, world, progress=progress))
    except AlignError as error:
        if world.size > 1:
            raise
        progress.say(f"{trial.name} failed: {error}")
        return Tried(trial, None, str(error))


def _publish(swept: Swept, parent: Run) -> None:
    rows = [
        {
            "name": one.trial.name,
            "settings": list(one.trial.settings),
            "steps": one.trained.steps if one.trained else 0,
            "before": one.trained.before if one.trained else {},
            "after": one.trained.after if one.trained else {},
            "failure": one.failure,
        }
        for one in swept.tried
    ]
    swept.folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("sweep.json", json.dumps(rows, indent=2)), ("sweep.txt", swept.text())):
        fs.publish(swept.folder / name, f"{text}\n".encode(), label="config")
        parent.log_artifact(swept.folder / name)


def _cells(one: Tried) -> list[str]:
    before, after = (one.trained.before, one.trained.after) if one.trained else ({}, {})
    values = [when.get(f"{EVAL}{name}") for name in HEADS.values() for when in (before, after)]
    return [one.trial.name, *("-" if value is None else f"{value:.4f}" for value in values)]
