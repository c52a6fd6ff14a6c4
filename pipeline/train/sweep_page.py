"""`sweep.html`: the runs of a sweep side by side, over or still to come, best first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from ...stages.report.cache_tables import duration
from ...stages.report.charts import Form, Series, chart
from ...stages.report.html_page import render_page
from ...stages.storage.run.run_folder import RunFolder
from ...stages.tracking.journal import EVAL
from .run_history import Curves, Measured, curves, read_history
from .trials import SweepResult, Trial, TrialResult, values_of

ACCURACY = "rewards/accuracies"
MEASURED = {"accuracy": ACCURACY, "margin": "rewards/margins", "loss": "loss"}
MOST_DRAWN = 8  # the page has as many colors
CHARTS = {
    "Accuracy": ACCURACY,
    "Margin": "rewards/margins",
    "Log-probs of chosen completions": "logps/chosen",
    "Log-probs of rejected completions": "logps/rejected",
    "Loss": "loss",
}


def sweep_page(result: SweepResult) -> str:
    """The page of a sweep as it is now."""
    ordered = _ordered(result)
    folders = {trial.name: RunFolder(result.folder / trial.name) for trial in ordered}
    links = {
        name: f"{name}/{folder.report.name}"
        for name, folder in folders.items()
        if folder.report.exists()
    }
    begun = [name for name, folder in folders.items() if folder.metrics.exists()]
    drawn = begun[:MOST_DRAWN]
    histories = {name: read_history(folders[name].metrics) for name in drawn}
    held_out = {name: curves(history.held_out) for name, history in histories.items()}
    learned = {name: curves(history.learned) for name, history in histories.items()}
    varied = [name for name, values in values_of(ordered).items() if len(values) > 1]
    ended = {one.trial.name: one for one in result.results}
    return render_page(
        "sweep.html.j2",
        title=f"Sweep: {result.folder.resolve().name}",
        facts={**result.facts, "runs": _progress(result)},
        notes=[*_notes(len(drawn) < len(begun)), *result.notes()],
        head=["run", *map(_short, varied), *MEASURED, "ending", "rows", "duration"],
        rows=[_row(trial, ended.get(trial.name), varied, result) for trial in ordered],
        links=links,
        held_out=_charts(held_out, "dots"),
        learned=_charts(learned, "line"),
    )


def _ordered(result: SweepResult) -> list[Trial]:
    """The most accurate first, on held-out rows if there are any; then those without a figure."""
    ended = {one.trial.name: one for one in result.results}
    planned = result.planned or tuple(one.trial for one in result.results)

    def rank(trial: Trial) -> tuple[float, float]:
        measured = ended[trial.name].measured if trial.name in ended else Measured()
        name = f"{EVAL}{ACCURACY}" if measured.rows == "held out" else ACCURACY
        known = {"held out": 0.0, "training": 1.0, "": 2.0}[measured.rows]
        return known, -measured.after.get(name, 0.0)

    return sorted(planned, key=rank)


def _progress(result: SweepResult) -> str:
    over, total = len(result.results), len(result.planned) or len(result.results)
    said = f"{over:,} of {total:,} over"
    took = [one.seconds for one in result.results if one.seconds]
    if over == total or result.is_stopped or not took:
        return said
    left = duration((total - over) * sum(took) / len(took))
    return f"{said}, about {left} left at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def _notes(leaves_some_out: bool) -> Iterator[str]:
    yield "The most accurate run stands first. Figures are of its beginning and of its end."
    if leaves_some_out:
        yield f"Curves are those of the first {MOST_DRAWN} runs of the table that have begun."


def _short(name: str) -> str:
    return name.partition(".")[2]


def _row(
    trial: Trial, ended: TrialResult | None, varied: list[str], result: SweepResult
) -> list[str]:
    settings = dict(text.split("=", 1) for text in trial.settings)
    chosen = [settings.get(name, "-") for name in varied]
    if ended is None:
        return [trial.name, *chosen, *("-" for _ in MEASURED), _state(trial, result), "-", "-"]
    measured = ended.measured
    prefix = EVAL if measured.rows == "held out" else ""
    figures = [
        _from_to(measured.before.get(prefix + name), measured.after.get(prefix + name))
        for name in MEASURED.values()
    ]
    took = duration(ended.seconds) if ended.seconds else "-"
    return [trial.name, *chosen, *figures, ended.ending, measured.rows or "-", took]


def _state(trial: Trial, result: SweepResult) -> str:
    """Of a run that is not over: whether it is the one that was at work."""
    if trial != result.planned[len(result.results)]:
        return "to come"
    if not result.is_stopped:
        return "running"
    has_begun = RunFolder(result.folder / trial.name).metrics.exists()
    return "stopped" if has_begun else "to come"


def _from_to(before: float | None, after: float | None) -> str:
    known = [f"{value:z.4f}" for value in (before, after) if value is not None]
    return " → ".join(known) or "-"


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
