"""The runs of a sweep and their results: a table in the terminal, and a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.errors import counted
from ...stages.report.cache_tables import duration, grid
from ...stages.report.charts import Form, Series, chart
from ...stages.report.html_page import render_page
from ...stages.storage.run.run_folder import RunFolder
from ...stages.tracking.journal import EVAL
from .run_history import Measured, curves, read_history

if TYPE_CHECKING:
    import polars as pl

# The title of a column, and the metric in it.
FIGURES = {"loss": "loss", "acc.": "rewards/accuracies", "margin": "rewards/margins"}
HEAD = (
    *("run", "ending", "rows"),
    *(f"{one} {at}" for one in FIGURES for at in ("from", "to")),
    "duration",
)
PAGE = "sweep.html"
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


@dataclass
class Trial:
    """One run of a sweep, and its result once it has ended."""

    name: str  # of its folder as well
    settings: tuple[str, ...]  # NAME=VALUE that differ from the other runs', as --set takes them
    ending: str = ""  # that of the run, or `failed`; empty until then
    failure: str = ""
    steps: int = 0
    measured: Measured = field(default_factory=Measured)
    seconds: float = 0.0  # that its training took; 0 if it failed or was done before


@dataclass
class Sweep:
    """The runs of a sweep, in their order."""

    folder: Path
    trials: Sequence[Trial]
    facts: Mapping[str, str]  # that tell it from other sweeps
    ranking: Sequence[str] = ()  # sentences, once all have ended

    @property
    def ended(self) -> list[Trial]:
        """The runs that have ended."""
        return [trial for trial in self.trials if trial.ending]

    @property
    def failures(self) -> list[Trial]:
        """The runs that failed."""
        return [trial for trial in self.trials if trial.failure]

    def text(self) -> str:
        """The table and its notes."""
        return "\n".join([*grid(HEAD, rows_of(self.ended)), *self.notes()])

    def notes(self) -> list[str]:
        """Notes on how to read the table."""
        stopped = (trial for trial in self.ended if trial.ending not in {"finished", "failed"})
        return [
            *([NO_COMPARING] if len(self.ended) > 1 else []),
            *(
                [TRAINING_ROWS]
                if any(one.measured.rows == "training" for one in self.ended)
                else []
            ),
            *(
                f"{trial.name} was stopped by train.max_time after "
                f"{counted(trial.steps, 'steps')}; the same command with --resume auto continues"
                for trial in stopped
            ),
            *(f"{trial.name} failed: {trial.failure}" for trial in self.failures),
            *self.ranking,
            f"in {self.folder}",
        ]


def varied_in(trials: Iterable[Trial]) -> dict[str, list[str]]:
    """Every setting that the trials make, and its values in their order."""
    found: dict[str, dict[str, None]] = {}
    for trial in trials:
        for text in trial.settings:
            name, _, value = text.partition("=")
            found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def rows_of(trials: Iterable[Trial]) -> list[list[str]]:
    """A line of the table for each run that has ended."""
    rows = []
    for trial in trials:
        found = trial.measured
        prefix = EVAL if found.rows == "held out" else ""
        values = [
            moment.get(f"{prefix}{name}")
            for name in FIGURES.values()
            for moment in (found.before, found.after)
        ]
        figures = ["-" if value is None else f"{value:z.4f}" for value in values]
        took = duration(trial.seconds) if trial.seconds else "-"
        rows.append([trial.name, trial.ending, found.rows or "-", *figures, took])
    return rows


def page_of(sweep: Sweep) -> str:
    """The runs side by side: the most accurate first, on held-out rows if there are any."""

    def rank(trial: Trial) -> tuple[int, float]:
        found = trial.measured
        prefix = EVAL if found.rows == "held out" else ""
        accuracy = found.after.get(f"{prefix}rewards/accuracies", 0.0)
        return ["held out", "training", ""].index(found.rows), -accuracy

    ordered = sorted(sweep.ended, key=rank)
    folders = {trial.name: RunFolder(sweep.folder / trial.name) for trial in ordered}
    begun = {name: folder for name, folder in folders.items() if folder.metrics.exists()}
    histories = {name: read_history(begun[name].metrics) for name in [*begun][:MOST_DRAWN]}
    notes = ["The most accurate run stands first.", *sweep.notes()]
    if len(histories) < len(begun):
        notes.insert(1, f"Curves are those of the first {MOST_DRAWN} runs of the table.")

    def charts(lines: Mapping[str, pl.DataFrame], form: Form) -> str:
        runs = {name: curves(one) for name, one in lines.items()}
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

    return render_page(
        "sweep.html.j2",
        title=f"Sweep: {sweep.folder.resolve().name}",
        facts={
            **{name: value for name, value in sweep.facts.items() if value},
            "runs": f"{len(sweep.ended):,} of {len(sweep.trials):,} over",
        },
        notes=notes,
        head=HEAD,
        rows=rows_of(ordered),
        links={
            name: f"{name}/{folder.report.name}"
            for name, folder in folders.items()
            if folder.report.exists()
        },
        held_out=charts({name: one.held_out for name, one in histories.items()}, "dots"),
        learned=charts({name: one.learned for name, one in histories.items()}, "line"),
    )
