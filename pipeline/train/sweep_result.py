"""The runs of a sweep and their results, as a table, as JSON, and on one page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...schemas.errors import AlignError, counted
from ...stages.report.cache_tables import duration, grid
from ...stages.report.charts import Form, Series, chart
from ...stages.report.html_page import render_page
from ...stages.storage.run.run_folder import RunFolder
from ...stages.tracking.journal import EVAL
from .run_history import Curves, Measured, curves, read_history
from .run_report import Trained

# The title of a column, and the metric in it.
HEADS = {"loss": "loss", "acc.": "rewards/accuracies", "margin": "rewards/margins"}
MOST_DRAWN = 8  # the page has as many colors
CHARTS = {
    "Accuracy": "rewards/accuracies",
    "Margin": "rewards/margins",
    "Log-probs of chosen completions": "logps/chosen",
    "Log-probs of rejected completions": "logps/rejected",
    "Loss": "loss",
}
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
class Trial:
    """One run of a sweep: its name, and the settings that differ from the others."""

    name: str  # of its folder as well
    settings: tuple[str, ...]  # NAME=VALUE, as --set takes them


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
    """The runs of a sweep, and the results of those that have ended, in their order."""

    folder: Path
    planned: tuple[Trial, ...]
    ended: tuple[TrialResult, ...] = ()
    standing: tuple[str, ...] = ()  # which of them is ahead, once all have ended
    facts: Mapping[str, str] = field(default_factory=dict)  # that tell it from other sweeps

    @property
    def failures(self) -> list[TrialResult]:
        """The runs that failed."""
        return [one for one in self.ended if one.error]

    def text(self) -> str:
        """The table and its notes."""
        return "\n".join([*grid(head(), rows_of(self.ended)), *self.notes()])

    def notes(self) -> Iterator[str]:
        """Notes on how to read the table."""
        if len(self.ended) > 1:
            yield NO_COMPARING
        if any(one.measured.rows == "training" for one in self.ended):
            yield TRAINING_ROWS
        for one in self.ended:
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


def varied_in(trials: Iterable[Trial]) -> dict[str, list[str]]:
    """Every setting that the trials make, and its values in their order."""
    found: dict[str, dict[str, None]] = {}
    for trial in trials:
        for text in trial.settings:
            name, _, value = text.partition("=")
            found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def head() -> list[str]:
    """The head of the table."""
    figures = [f"{name} {when}" for name in HEADS for when in ("from", "to")]
    return ["run", "ending", "rows", *figures, "duration"]


def rows_of(results: Iterable[TrialResult]) -> list[list[str]]:
    """A line of the table for each run."""
    return [_cells(one) for one in results]


def _cells(one: TrialResult) -> list[str]:
    moments = (one.measured.before, one.measured.after)
    prefix = EVAL if one.measured.rows == "held out" else ""
    values = [moment.get(f"{prefix}{name}") for name in HEADS.values() for moment in moments]
    numbers = ["-" if value is None else f"{value:z.4f}" for value in values]
    took = duration(one.seconds) if one.seconds else "-"
    return [one.trial.name, one.ending, one.measured.rows or "-", *numbers, took]


def as_json(result: SweepResult) -> str:
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
        for one in result.ended
    ]
    return json.dumps(rows, indent=2)


def as_page(result: SweepResult) -> str:
    """The runs side by side: the most accurate first, on held-out rows if there are any."""

    def rank(one: TrialResult) -> tuple[int, float]:
        name = f"{EVAL}rewards/accuracies"
        is_held_out = one.measured.rows == "held out"
        name = name if is_held_out else name.removeprefix(EVAL)
        return (0 if is_held_out else 1 if one.measured.rows else 2), -one.measured.after.get(
            name, 0
        )

    ordered = sorted(result.ended, key=rank)
    folders = {one.trial.name: RunFolder(result.folder / one.trial.name) for one in ordered}
    begun = {name: folder for name, folder in folders.items() if folder.metrics.exists()}
    drawn = [*begun][:MOST_DRAWN]
    histories = {name: read_history(begun[name].metrics) for name in drawn}
    notes = ["The most accurate run stands first.", *result.notes()]
    if len(drawn) < len(begun):
        notes.insert(1, f"Curves are those of the first {MOST_DRAWN} runs of the table.")
    return render_page(
        "sweep.html.j2",
        title=f"Sweep: {result.folder.resolve().name}",
        facts={
            **{name: value for name, value in result.facts.items() if value},
            "runs": f"{len(result.ended):,} of {len(result.planned):,} over",
        },
        notes=notes,
        head=head(),
        rows=rows_of(ordered),
        links={
            name: f"{name}/{folder.report.name}"
            for name, folder in folders.items()
            if folder.report.exists()
        },
        held_out=_charts({name: curves(one.held_out) for name, one in histories.items()}, "dots"),
        learned=_charts({name: curves(one.learned) for name, one in histories.items()}, "line"),
    )


def _charts(runs: Mapping[str, Curves], form: Form) -> str:
    return "".join(
        chart(
            title,
            [
                Series(name, points.get(metric, ()), f"c{index}", form=form)
                for index, (name, points) in enumerate(runs.items())
            ],
            x_label="step",
        )
        for title, metric in CHARTS.items()
    )


PAGES = {"sweep.json": as_json, "sweep.txt": SweepResult.text, "sweep.html": as_page}
