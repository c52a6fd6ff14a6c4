"""`sweep.html`: the runs of a sweep on one page, each a curve, with the way to its own page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..stages.report.charts import Series, chart
from ..stages.report.html_page import page, section, side_by_side, table
from ..stages.storage.run_folder import RunFolder
from .journal import history_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..stages.report.charts import Form
    from .journal import Curves
    from .swept import Swept

COLORS = 8
CHARTS = {
    "Accuracy": "rewards/accuracies",
    "Margin": "rewards/margins",
    "Log-probs of chosen completions": "logps/chosen",
    "Log-probs of rejected completions": "logps/rejected",
    "Loss": "loss",
}


def sweep_page(swept: Swept) -> str:
    """All runs that are over so far."""
    folders = {one.trial.name: RunFolder(swept.folder / one.trial.name) for one in swept.tried}
    links = {
        name: f"{name}/{folder.report.name}"
        for name, folder in folders.items()
        if folder.report.exists()
    }
    drawn = set(CHARTS.values())
    histories = {
        name: history_of(folder.metrics, is_drawn=drawn.__contains__)
        for name, folder in folders.items()
        if folder.metrics.exists()
    }
    held_out = {name: history.held_out for name, history in histories.items()}
    learned = {name: history.learned for name, history in histories.items()}
    return page(
        f"Sweep: {swept.folder.resolve().name}",
        list(swept.notes()),
        section("Runs", table(swept.head, swept.rows, links=links)),
        section("Held-out rows", _charts(held_out, "dots")),
        section("Steps learned from", _charts(learned, "line")),
    )


def _charts(runs: Mapping[str, Curves], form: Form) -> str:
    figures = []
    for title, metric in CHARTS.items():
        series = [
            Series(name, curves.get(metric, ()), f"c{index % COLORS}", form=form)
            for index, (name, curves) in enumerate(runs.items())
        ]
        figures.append(chart(title, series, across="step"))
    return side_by_side("".join(figures))
