"""What stage 2 has to say when it is done."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..stages.storage.run_folder import read_ending
from ..stages.tracking.journal import EVAL
from .journal import history_of
from .measured import Measured

if TYPE_CHECKING:
    from ..stages.storage.run_folder import RunFolder
    from ..stages.train.loop import Ending

logger = logging.getLogger("align")

# Worth a line of its own, where a method reports it.
HEADLINES = ("loss", "rewards/accuracies", "rewards/margins", "log_odds/accuracy", "log_odds/ratio")


@dataclass(frozen=True)
class Trained:
    """A run that has ended, and what was measured first and last."""

    folder: RunFolder
    ending: Ending
    steps: int
    measured: Measured
    is_old: bool = False  # it had ended before it was asked for

    def text(self) -> str:
        """A few lines for a person."""
        already = " already: this run is finished, nothing was trained" if self.is_old else ""
        lines = [f"{self.folder.root}: {self.steps:,} steps done{already}"]
        if self.ending == "finished":
            lines.append(f"model in {self.folder.model}")
        else:
            lines.append("stopped by train.max_time; the same command with --resume auto goes on")
        return "\n".join([*lines, *before_and_after(self.measured)])


def outcome(folder: RunFolder, ending: Ending) -> Trained:
    """Reads back how far a run came, and what it measured."""
    if not folder.metrics.exists():
        logger.warning("%s is gone: what was measured is lost.", folder.metrics)
        known = read_ending(folder)
        return Trained(folder, ending, known.step if known else 0, Measured())
    history = history_of(folder.metrics, is_drawn=lambda _: False)
    return Trained(folder, ending, history.steps, history.measured)


def before_and_after(measured: Measured) -> list[str]:
    """A small table of the held-out rows, empty where nothing was measured twice."""
    before, after = measured.before, measured.after
    names = [name for name in HEADLINES if f"{EVAL}{name}" in before and f"{EVAL}{name}" in after]
    if not names:
        return []
    width = max(map(len, names))
    rows = [
        f"  {name:{width}}  {before[EVAL + name]:9.4f}  {after[EVAL + name]:9.4f}" for name in names
    ]
    return [f"  {'held-out rows':{width}}  {'before':>9}  {'after':>9}", *rows]
