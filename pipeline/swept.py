"""What came of a sweep: a row for each of its runs, for a person and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..stages.report.cache_tables import grid
from ..stages.tracking.journal import EVAL
from .measured import Measured

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..schemas.errors import AlignError
    from .trained import Trained
    from .trials import Trial

# What stands above a column, and the metric in it.
HEADS = {"loss": "loss", "acc.": "rewards/accuracies", "margin": "rewards/margins"}
NO_COMPARING = (
    "Losses and margins of different methods and betas do not compare; accuracies do, as far as "
    "methods compare the same: whole completions or their means per token, with a reference or "
    "without. `align methods` tells."
)
TRAINING_ROWS = (
    "training: of the first and the last logged step, each over other rows than the other. "
    "--set train.eval_fraction=0.05 holds rows out to measure on."
)


@dataclass(frozen=True)
class Tried:
    """What came of one run."""

    trial: Trial
    trained: Trained | None = None
    error: AlignError | None = None

    @property
    def measured(self) -> Measured:
        """Nothing where it failed."""
        return self.trained.measured if self.trained else Measured()

    @property
    def ending(self) -> str:
        """Finished, or why it is not."""
        return self.trained.ending if self.trained else "failed"


@dataclass(frozen=True)
class Swept:
    """The runs of a sweep that are over, in the order they were made."""

    folder: Path
    tried: tuple[Tried, ...]

    @property
    def failures(self) -> list[Tried]:
        """Runs that a mistake or a mishap ended."""
        return [one for one in self.tried if one.error]

    @property
    def head(self) -> list[str]:
        """What stands above the columns of the table."""
        columns = [f"{name} {when}" for name in HEADS for when in ("from", "to")]
        return ["run", "ending", "rows", *columns]

    @property
    def rows(self) -> list[list[str]]:
        """A line of the table for each run."""
        return [_cells(one) for one in self.tried]

    def text(self) -> str:
        """One table for a person, and what has to be known to read it."""
        return "\n".join([*grid(self.head, self.rows), *self.notes()])

    def as_json(self) -> str:
        """Every number of the two moments of each run."""
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
            for one in self.tried
        ]
        return json.dumps(rows, indent=2)

    def notes(self) -> Iterator[str]:
        """What has to be known to read the table."""
        if len(self.tried) > 1:
            yield NO_COMPARING
        if any(one.measured.rows == "training" for one in self.tried):
            yield TRAINING_ROWS
        for one in self.tried:
            if one.trained and one.ending != "finished":
                yield (
                    f"{one.trial.name} was stopped by train.max_time after "
                    f"{one.trained.steps:,} steps; the same command with --resume auto goes on"
                )
        for one in self.failures:
            yield f"{one.trial.name} failed: {one.error}"
        yield f"in {self.folder}"


def _cells(one: Tried) -> list[str]:
    moments = (one.measured.before, one.measured.after)
    prefix = EVAL if one.measured.rows == "held out" else ""
    values = [moment.get(f"{prefix}{name}") for name in HEADS.values() for moment in moments]
    numbers = ["-" if value is None else f"{value:.4f}" for value in values]
    return [one.trial.name, one.ending, one.measured.rows or "-", *numbers]
