"""The TensorBoard tracker: event files in the run's folder."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...schemas.config import TrackingOptions
from .metrics_log import MetricsLine, read_metrics
from .run_record import RunFacts, Sent
from .tracker import Tracker, typed

FOLDER = "tensorboard"  # in the folder of the run


class TensorboardTracker(Tracker):
    """A folder with an event file per start; a later file hides the steps that it repeats."""

    title = "TensorBoard"
    named_by = "the folder tensorboard of the run"
    library = "tensorboard"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._library = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = None

    @staticmethod
    def address_of(options: TrackingOptions, home: Path) -> str:
        """The folder of the event files, in the run's folder."""
        return str(home.absolute() / FOLDER)

    @staticmethod
    def plain_address(address: str) -> str:
        """The folder relative to the run's, so that a run can be moved."""
        return FOLDER

    def has(self, facts: RunFacts, run_id: str) -> bool:
        """Whether the folder still exists."""
        return (Path(self.address) / run_id).is_dir()

    def begin(self, facts: RunFacts, sent: Sent, metrics: Path) -> Sent:
        """Opens a new event file, from the last step that may be written already."""
        if self._writer:
            self._writer.close()
        before = [line for line in read_metrics(metrics) if line.end <= sent.offset]
        step = before[-1].step if before else 0
        # `purge_step` hides whole steps, so all lines of that step are sent again.
        offset = max((line.end for line in before if line.step < step), default=0)
        run_id = f"{re.sub(r'[^A-Za-z0-9_.]+', '-', facts.name).strip('-.')[:100]}-{facts.key}"
        folder = Path(self.address) / run_id
        _await_next_second(folder)
        self._writer = self._library.SummaryWriter(str(folder), purge_step=step)
        return Sent(run_id, offset, sent.files)

    def log(self, lines: Sequence[MetricsLine]) -> None:
        """Writes every number at its step and time."""
        for line in lines:
            for name, value in line.metrics.items():
                self._writer.add_scalar(name, value, line.step, walltime=line.time)
        self._writer.flush()

    def label(self, facts: RunFacts) -> None:
        """Writes the parameters as hyperparameters, and everything as text."""
        tables = {"settings": facts.params, "tags": facts.tags, "data": facts.data()}
        models = {
            folder: ", ".join(f"{k} {v}" for k, v in tags.items())
            for folder, tags in facts.models.items()
        }
        texts = {name: table(rows) for name, rows in {**tables, "models": models}.items() if rows}
        texts |= {"description": facts.description, "status": facts.status or "RUNNING"}
        for name, text in texts.items():
            self._writer.add_text(name, text)
        # TensorBoard shows only the first hyperparameters, so empty ones are not written.
        if settings := {name: typed(value) for name, value in facts.params.items()}:
            summary = importlib.import_module("torch.utils.tensorboard.summary")
            experiment, start, end = summary.hparams(settings, {})
            for one in (experiment, start, *([end] if facts.status == "FINISHED" else [])):
                self._writer.file_writer.add_summary(one)
        self._writer.flush()

    def close(self, facts: RunFacts) -> None:
        """Closes the event file."""
        self._writer.close()
        self._writer = None


def table(rows: Mapping[str, str]) -> str:
    """A Markdown table of two columns, with markup characters as HTML entities."""
    escaped = {"\n": "&#10;", "\r": "&#13;", **{sign: f"&#{ord(sign)};" for sign in "|\\`*_<>[]"}}
    change = str.maketrans({"&": "&amp;", **escaped})
    lines = [
        f"| {name.translate(change)} | {value.translate(change)} |" for name, value in rows.items()
    ]
    return "\n".join(["| name | value |", "|---|---|", *lines])


def _await_next_second(folder: Path) -> None:
    """Waits while the newest event file is of this second.

    TensorBoard reads files in the order of their names, which begin with the second. Those of one
    second may be in a wrong order, and steps would be hidden.
    """
    seconds = {int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")}
    while int(time.time()) in seconds:
        time.sleep(0.02)


TRACKER = TensorboardTracker
