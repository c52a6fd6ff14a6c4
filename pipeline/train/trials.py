"""The runs of a sweep and their results, as a table and as JSON."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...schemas.errors import AlignError, UsageError, counted
from ...stages.methods.table import recipe_of
from ...stages.report.cache_tables import grid
from ...stages.tracking.journal import EVAL
from ..options.settings import parse_varied
from ..options.table import SETS
from .run_history import Measured
from .run_report import Trained

MOST_TRIALS = 10_000


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its name, and the settings that differ from the others."""

    name: str  # of its folder as well
    settings: tuple[str, ...]  # NAME=VALUE, as --set takes them


def varied_by(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parses --vary; refuses a setting given twice, and those that a sweep sets itself."""
    names = [text.partition("=")[0] for text in texts]
    for name in names:
        if way := SETS["sweep"].get(name):
            raise UsageError(f"--vary {name}: a sweep sets it itself. Use {way}.")
        if names.count(name) > 1:
            raise UsageError(f"{name} is varied twice. Give all of its values at once.")
    return parse_varied(texts)


def trials_of(methods: Sequence[str], varied: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Every combination; an option that a method does not have is left out for it."""
    recipes = [recipe_of(name, {}) for name in methods]
    for key in varied:
        section, _, option = key.partition(".")
        if section == "method" and not any(option in recipe.option_names for recipe in recipes):
            raise UsageError(f"{key}: none of {', '.join(methods)} has it. See `align methods`.")
    trials: list[Trial] = []
    for method, recipe in zip(methods, recipes, strict=True):
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
    _require_own_names(trials)
    return trials


def values_of(trials: Iterable[Trial]) -> dict[str, list[str]]:
    """Every setting that the trials make, and its values in their order."""
    found: dict[str, dict[str, None]] = {}
    for trial in trials:
        for text in trial.settings:
            name, _, value = text.partition("=")
            found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def _require_own_names(trials: Iterable[Trial]) -> None:
    """Refuses two runs in one folder; some file systems ignore the case of letters."""
    known: dict[str, Trial] = {}
    for trial in trials:
        other = known.setdefault(trial.name.casefold(), trial)
        if other is not trial:
            raise UsageError(
                f"{' '.join(other.settings)} and {' '.join(trial.settings)} would both be the "
                f"run {trial.name}. Leave one of them out."
            )


# The title of a column, and the metric in it.
HEADS = {"loss": "loss", "acc.": "rewards/accuracies", "margin": "rewards/margins"}
NO_COMPARING = (
    "Losses and margins of different methods and betas do not compare; accuracies do, as far as "
    "methods compare the same: whole completions or their means per token, with a reference or "
    "without. `align methods` shows which."
)
TRAINING_ROWS = (
    "training: of the first and the last logged step, each over other rows than the other. "
    "--set train.eval_fraction=0.05 holds rows out to measure on."
)


@dataclass(frozen=True)
class TrialResult:
    """The result of one run."""

    trial: Trial
    trained: Trained | None = None
    error: AlignError | None = None
    seconds: float = 0.0  # that its training took; 0 if it failed or was done before

    @property
    def measured(self) -> Measured:
        """Its metrics; empty if it failed."""
        return self.trained.measured if self.trained else Measured()

    @property
    def ending(self) -> str:
        """`finished`, or the reason why not."""
        return self.trained.ending if self.trained else "failed"


@dataclass(frozen=True)
class SweepResult:
    """The results of the runs that have ended, in their order."""

    folder: Path
    results: tuple[TrialResult, ...]
    standing: tuple[str, ...] = ()  # which of them is ahead, once all have ended
    planned: tuple[Trial, ...] = ()  # these and those to come
    facts: Mapping[str, str] = field(default_factory=dict)  # that tell it from other sweeps
    is_stopped: bool = False

    @property
    def failures(self) -> list[TrialResult]:
        """The runs that failed."""
        return [one for one in self.results if one.error]

    @property
    def head(self) -> list[str]:
        """The head of the table."""
        columns = [f"{name} {when}" for name in HEADS for when in ("from", "to")]
        return ["run", "ending", "rows", *columns]

    @property
    def rows(self) -> list[list[str]]:
        """A line of the table for each run."""
        return [_cells(one) for one in self.results]

    def text(self) -> str:
        """The table and its notes."""
        return "\n".join([*grid(self.head, self.rows), *self.notes()])

    def as_json(self) -> str:
        """First and last metrics of each run as JSON."""
        rows = [
            {
                "name": one.trial.name,
                "settings": list(one.trial.settings),
                "ending": one.ending,
                "steps": one.trained.steps if one.trained else 0,
                "rows": one.measured.rows,
                "before": one.measured.before,
                "after": one.measured.after,
                "failure": str(one.error or ""),
            }
            for one in self.results
        ]
        return json.dumps(rows, indent=2)

    def notes(self) -> Iterator[str]:
        """Notes on how to read the table."""
        if len(self.results) > 1:
            yield NO_COMPARING
        if any(one.measured.rows == "training" for one in self.results):
            yield TRAINING_ROWS
        for one in self.results:
            if one.trained and one.ending != "finished":
                steps = counted(one.trained.steps, "steps")
                yield (
                    f"{one.trial.name} was stopped by train.max_time after {steps}; the same "
                    "command with --resume auto continues"
                )
        for one in self.failures:
            yield f"{one.trial.name} failed: {one.error}"
        yield from self.standing
        yield f"in {self.folder}"


def _cells(one: TrialResult) -> list[str]:
    moments = (one.measured.before, one.measured.after)
    prefix = EVAL if one.measured.rows == "held out" else ""
    values = [moment.get(f"{prefix}{name}") for name in HEADS.values() for moment in moments]
    numbers = ["-" if value is None else f"{value:z.4f}" for value in values]
    return [one.trial.name, one.ending, one.measured.rows or "-", *numbers]
