"""TensorBoard as a tracker: event files in the folder of the run."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...schemas.config import TrackingOptions
from .metrics_log import MetricsLine, read_metrics
from .run_record import RunFacts, Sent
from .tracker import Tracker, typed

FOLDER = "tensorboard"  # in the folder of the run


class TensorboardTracker(Tracker):
    """A run as a folder with an event file per start, whose first event hides what it repeats."""

    title = "TensorBoard"
    named_by = "the folder tensorboard of the run"
    library = "tensorboard"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._library = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = None

    @staticmethod
    def address_of(options: TrackingOptions, home: Path) -> str:
        """The folder in that of the run."""
        return str(home.absolute() / FOLDER)

    @staticmethod
    def plain_address(address: str) -> str:
        """It goes where the run's folder goes."""
        return FOLDER

    def has(self, facts: RunFacts, run_id: str) -> bool:
        """Whether nobody has removed the folder."""
        return (Path(self.address) / run_id).is_dir()

    def begin(self, facts: RunFacts, sent: Sent, metrics: Path) -> Sent:
        """Begins a file of events, from the last step on that may be there already."""
        if self._writer:
            self._writer.close()
        before = [line for line in read_metrics(metrics) if line.end <= sent.offset]
        step = before[-1].step if before else 0
        # Lines are hidden by their step, so all lines of that step are sent again.
        offset = max((line.end for line in before if line.step < step), default=0)
        run_id = f"{re.sub(r'[^A-Za-z0-9_.]+', '-', facts.name).strip('-.')[:100]}-{facts.key}"
        folder = str(Path(self.address) / run_id)
        self._writer = self._library.SummaryWriter(folder, purge_step=step)
        return Sent(run_id, offset, sent.files)

    def log(self, lines: Sequence[MetricsLine]) -> None:
        """Every number, at its step and time."""
        for line in lines:
            for name, value in line.metrics.items():
                self._writer.add_scalar(name, value, line.step, walltime=line.time)
        self._writer.flush()

    def label(self, facts: RunFacts) -> None:
        """Parameters as hyperparameters, and everything as texts."""
        tables = {"settings": facts.params, "tags": facts.tags, "data": facts.data()}
        models = {
            folder: ", ".join(f"{k} {v}" for k, v in tags.items())
            for folder, tags in facts.models.items()
        }
        texts = {name: table(rows) for name, rows in {**tables, "models": models}.items() if rows}
        texts |= {"description": facts.description, "status": facts.status or "RUNNING"}
        for name, text in texts.items():
            self._writer.add_text(name, text)
        # A reader keeps the first hyperparameters that it meets, so none are written before they
        # are known.
        if settings := {name: typed(value) for name, value in facts.params.items()}:
            summary = importlib.import_module("torch.utils.tensorboard.summary")
            experiment, start, end = summary.hparams(settings, {})
            for one in (experiment, start, *([end] if facts.status == "FINISHED" else [])):
                self._writer.file_writer.add_summary(one)
        self._writer.flush()

    def close(self, facts: RunFacts) -> None:
        """Closes the file."""
        self._writer.close()
        self._writer = None


def table(rows: Mapping[str, str]) -> str:
    """Two columns of Markdown, with signs that would be markup written as HTML has them."""
    escaped = {"\n": "&#10;", "\r": "&#13;", **{sign: f"&#{ord(sign)};" for sign in "|\\`*_<>[]"}}
    change = str.maketrans({"&": "&amp;", **escaped})
    lines = [
        f"| {name.translate(change)} | {value.translate(change)} |" for name, value in rows.items()
    ]
    return "\n".join(["| name | value |", "|---|---|", *lines])


TRACKER = TensorboardTracker
