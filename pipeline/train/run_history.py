"""A run's journal as tables and curves, and its first and last measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ...stages.tracking.journal import EVAL, RESERVED, entry_batches

if TYPE_CHECKING:
    import polars as pl

Curves: TypeAlias = Mapping[str, list[tuple[float, float]]]  # (step, value) by name, steps rising

MeasuredOn = Literal["held out", "training", ""]


@dataclass(frozen=True)
class Measured:
    """Two moments of a run, their metrics named as in its journal."""

    rows: MeasuredOn = ""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)  # empty unless of a later step


@dataclass(frozen=True)
class History:
    """A run's journal: step, time and a column per metric, null where a line lacks it."""

    learned: pl.DataFrame
    held_out: pl.DataFrame  # the names of its metrics begin with eval/

    @property
    def steps(self) -> int:
        """The last step with a line."""
        return int(max([0, *self.learned["step"], *self.held_out["step"]]))

    @property
    def times(self) -> tuple[datetime | None, datetime | None]:
        """When the first and the last line were written."""
        known = [*self.learned["time"], *self.held_out["time"]]
        return min(known, default=None), max(known, default=None)

    def measured(self, model_step: int | None = None) -> Measured:
        """First and last: on held-out rows, or on training steps where nothing is held out.

        `model_step`: the step whose model was written, if that is not the last.
        """
        kinds: tuple[tuple[MeasuredOn, pl.DataFrame, str], ...] = (
            ("held out", self.held_out, f"{EVAL}loss"),
            ("training", self.learned, "loss"),
        )
        for rows, lines, loss in kinds:
            if loss in lines.columns:
                known = lines.drop_nulls(loss)
                if model_step is not None:
                    known = known.filter(known["step"] <= model_step)
                return Measured(rows, *_ends(known)) if len(known) else Measured(rows)
        return Measured("training")


def read_history(metrics: Path) -> History:
    """Reads the journal of a run, some lines at a time."""
    import polars as pl  # noqa: PLC0415 - 20 MiB that a rank without a report can do without

    kinds = pl.Schema({"step": pl.Int64(), "time": pl.Datetime("ms", "UTC")})
    frames = [pl.DataFrame(schema=kinds)]
    for entries in entry_batches(metrics):
        rows = [
            {
                "step": entry.step,
                "time": entry.points[0].time_ms,
                **{point.key: point.value for point in entry.points},
            }
            for entry in entries
        ]
        frames.append(pl.from_dicts(rows, schema_overrides=kinds, infer_schema_length=None))
    lines = pl.concat(frames, how="diagonal")

    def of(names: Sequence[str]) -> pl.DataFrame:
        holds_one = pl.any_horizontal(
            pl.lit(False), *(pl.col(name).is_not_null() for name in names)
        )
        return lines.filter(holds_one).select(*kinds, *names)

    held_out = [name for name in lines.columns if name.startswith(EVAL)]
    learned = [name for name in lines.columns if name not in {*kinds, *held_out}]
    return History(of(learned), of(held_out))


def curves(lines: pl.DataFrame) -> Curves:
    """Every metric's points, by its name without eval/."""
    return {
        name.removeprefix(EVAL): lines.select("step", name).drop_nulls().rows()
        for name in lines.columns
        if name not in RESERVED
    }


def _ends(lines: pl.DataFrame) -> tuple[dict[str, float], dict[str, float]]:
    first, last = lines.row(0, named=True), lines.row(-1, named=True)
    return _metrics(first), _metrics(last) if last["step"] > first["step"] else {}


def _metrics(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value for name, value in line.items() if name not in RESERVED and value is not None
    }
