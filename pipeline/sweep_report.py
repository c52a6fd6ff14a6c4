"""`sweep.html`: the runs of a sweep on one page, each a curve, with the way to its own page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..stages.report.charts import Series, chart
from ..stages.report.page import grid, page, section, table
from ..stages.storage.run_folder import RunFolder
from .journal import history_of

if TYPE_CHECKING:
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
    return page(
        f"Sweep: {swept.folder.resolve().name}",
        list(swept.notes()),
        section("Runs", table(swept.head, swept.rows, links=links)),
        section("Held-out rows", _charts(folders, is_held_out=True)),
        section("Steps learned from", _charts(folders, is_held_out=False)),
    )


def _charts(folders: dict[str, RunFolder], *, is_held_out: bool) -> str:
    histories = {
        name: history_of(folder.metrics)
        for name, folder in folders.items()
        if folder.metrics.exists()
    }
    curves = {
        name: history.held_out if is_held_out else history.learned
        for name, history in histories.items()
    }
    figures = [
        chart(
            title,
            [
                Series(
                    name,
                    own.get(metric, ()),
                    f"c{index % COLORS}",
                    form="dots" if is_held_out else "line",
                )
                for index, (name, own) in enumerate(curves.items())
            ],
            across="step",
        )
        for title, metric in CHARTS.items()
    ]
    return grid("".join(figures))
