"""The results of a sweep's runs, as a table in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...schemas.errors import counted
from ...stages.report.charts import Series, chart
from ...stages.report.page import Section, render_page
from ...stages.report.text_tables import duration, grid
from ...stages.storage.run.run_folder import RunFolder
from ...stages.tracking.metrics_log import prefix_of
from .run_history import Measured, curves, read_history

PAGE = "sweep.html"
# The title of a column, and the metric in it.
FIGURES = {"loss": "loss", "acc.": "rewards/accuracies", "margin": "rewards/margins"}
HEAD = (
    "run",
    "ending",
    "rows",
    *(f"{one} {at}" for one in FIGURES for at in ("from", "to")),
    "duration",
)
CHARTS = {
    "Accuracy": "rewards/accuracies",
    "Margin": "rewards/margins",
    "Log-probs of chosen completions": "logps/chosen",
    "Log-probs of rejected completions": "logps/rejected",
    "Loss": "loss",
}
MOST_DRAWN = 8  # the page has as many colors
NOT_COMPARABLE = (
    "Losses and margins of different methods and betas are not comparable. Accuracies are, if the "
    "methods compare the same values: sums or means per token, with a reference or without. See "
    "`align methods`."
)
TRAINING_ROWS = (
    "training: of the first and the last logged step, which have different rows. "
    "--set train.eval_fraction=0.05 holds rows out for evaluation."
)


@dataclass
class Trial:
    """One run of a sweep, and its result once it has ended."""

    name: str  # also of its folder
    settings: tuple[str, ...]  # NAME=VALUE for --set that differ from other runs'
    ending: str = ""  # the run's status, or `failed`; empty before its end
    failure: str = ""
    steps: int = 0
    measured: Measured = field(default_factory=Measured)
    seconds: float = 0.0  # duration of the training; 0 if it failed or had ended before

    def row(self) -> list[str]:
        """Its row of the table."""
        measured = self.measured
        prefix = prefix_of(measured.sets[0]) if measured.rows == "held out" else ""
        values = [
            moment.get(f"{prefix}{name}")
            for name in FIGURES.values()
            for moment in (measured.before, measured.after)
        ]
        figures = ["-" if value is None else f"{value:z.4f}" for value in values]
        took = duration(self.seconds) if self.seconds else "-"
        return [self.name, self.ending, measured.rows or "-", *figures, took]


@dataclass
class Sweep:
    """The runs of a sweep, in their order."""

    folder: Path
    trials: Sequence[Trial]
    facts: Mapping[str, str]  # distinguish it from other sweeps
    ranking: Sequence[str] = ()  # sentences, once all runs have ended

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
        return "\n".join([*grid(HEAD, [trial.row() for trial in self.ended]), *self.notes()])

    def notes(self) -> list[str]:
        """Notes on how to read the table."""
        notes = [NOT_COMPARABLE] if len(self.ended) > 1 else []
        if any(trial.measured.rows == "training" for trial in self.ended):
            notes.append(TRAINING_ROWS)
        for trial in self.ended:
            if trial.failure:
                notes.append(f"{trial.name} failed: {trial.failure}")
            elif trial.ending != "finished":
                notes.append(
                    f"{trial.name} was stopped by train.max_time after "
                    f"{counted(trial.steps, 'steps')}; resume with the same command and --resume "
                    "auto"
                )
        return [*notes, *self.ranking, f"in {self.folder}"]


def page_of(sweep: Sweep) -> str:
    """The page: a table of the runs, sorted by accuracy, and their curves."""

    def rank(trial: Trial) -> tuple[int, float]:
        found = trial.measured
        prefix = prefix_of(found.sets[0]) if found.rows == "held out" else ""
        accuracy = found.after.get(f"{prefix}rewards/accuracies", 0.0)
        return ["held out", "training", ""].index(found.rows), -accuracy

    ordered = sorted(sweep.ended, key=rank)
    folders = {trial.name: RunFolder(sweep.folder / trial.name) for trial in ordered}
    started = [name for name, folder in folders.items() if folder.metrics.exists()]
    notes = ["The most accurate run comes first.", *sweep.notes()]
    if len(started) > MOST_DRAWN:
        notes.insert(1, f"The curves show the first {MOST_DRAWN} runs of the table.")

    # In each chart the dots of all runs are drawn over the lines of all runs.
    histories = {name: read_history(folders[name].metrics) for name in started[:MOST_DRAWN]}
    learned = {name: curves(history.learned) for name, history in histories.items()}
    held_out = {
        name: curves(history.held_out, prefix_of(history.sets[0]))
        for name, history in histories.items()
    }
    figures = []
    for title, metric in CHARTS.items():
        lines = [
            Series(name, metrics.get(metric, ()), f"c{index}")
            for index, (name, metrics) in enumerate(learned.items())
        ]
        dots = [
            Series(name, metrics.get(metric, ()), f"c{index}", form="dots")
            for index, (name, metrics) in enumerate(held_out.items())
        ]
        figures.append(chart(title, [*lines, *dots], x_label="step"))
    links = {
        name: f"{name}/{folder.report.name}"
        for name, folder in folders.items()
        if folder.report.exists()
    }
    sections = [
        Section("Runs", table=[HEAD, *(trial.row() for trial in ordered)], links=links),
        Section(
            "Curves",
            figures="".join(figures),
            note="Lines are training rows, dots are held-out rows.",
        ),
    ]
    return render_page(
        f"Sweep: {sweep.folder.resolve().name}",
        sections,
        lead=notes,
        facts={
            **{name: value for name, value in sweep.facts.items() if value},
            "runs": f"{len(sweep.ended):,} of {len(sweep.trials):,} ended",
        },
    )
