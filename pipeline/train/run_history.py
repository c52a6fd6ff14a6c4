"""A run's metrics as tables and curves, and its first and last measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...stages.tracking.metrics_log import EVAL, EVALUATE, RESERVED, prefix_of, read_metrics

if TYPE_CHECKING:
    import polars as pl

LINES_AT_ONCE = 1000


@dataclass(frozen=True)
class Measured:
    """The first and the last metrics of a run, named as in metrics.jsonl."""

    rows: Literal["held out", "training", ""] = ""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)  # empty without a later step
    sets: tuple[str, ...] = ("",)  # the names of the held-out sets; one alone may have none


@dataclass(frozen=True)
class History:
    """Lines of metrics.jsonl: step, time and a column per metric, null if a line lacks it."""

    learned: pl.DataFrame
    held_out: pl.DataFrame  # the names of its metrics begin with eval/

    @property
    def sets(self) -> tuple[str, ...]:
        """The names of the held-out sets, as in eval/NAME/loss; one alone may have none."""
        found = [re.fullmatch(f"{EVAL}(?:([^/]+)/)?loss", name) for name in self.held_out.columns]
        names = tuple(match[1] or "" for match in found if match)
        return ("",) if "" in names else names or ("",)  # eval/router/loss is of no set

    @property
    def steps(self) -> int:
        """The last step with a line."""
        return int(max([0, *self.learned["step"], *self.held_out["step"]]))

    @property
    def times(self) -> tuple[datetime | None, datetime | None]:
        """The times of the first and the last line."""
        known = [*self.learned["time"], *self.held_out["time"]]
        return min(known, default=None), max(known, default=None)

    def measured(self, model_step: int | None = None) -> Measured:
        """The first and last metrics of held-out rows, or of training steps if there are none.

        `model_step`: the step of the written model, if it is not the last one.
        """
        lines, loss = self.held_out, f"{prefix_of(self.sets[0])}loss"
        rows: Literal["held out", "training"] = "held out"
        if loss not in lines.columns:
            lines, loss, rows = self.learned, "loss", "training"
        if loss not in lines.columns:
            return Measured(rows)
        known = lines.drop_nulls(loss)
        if model_step is not None:
            known = known.filter(known["step"] <= model_step)
        if known.is_empty():
            return Measured(rows)
        first, last = known.row(0, named=True), known.row(-1, named=True)
        after = _metrics(last) if last["step"] > first["step"] else {}
        return Measured(rows, _metrics(first), after, self.sets)


def _metrics(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value for name, value in line.items() if name not in RESERVED and value is not None
    }


def read_history(metrics: Path) -> History:
    """Reads metrics.jsonl in chunks."""
    import polars as pl  # noqa: PLC0415 - 20 MiB that ranks without a report do not need

    kinds = pl.Schema({"step": pl.Int64(), "time": pl.Datetime("ms", "UTC")})
    frames = [pl.DataFrame(schema=kinds)]
    # The lines of `align evaluate` are for trackers: they are no part of the training.
    measured = (
        line
        for line in read_metrics(metrics)
        if not all(name.startswith(EVALUATE) for name in line.metrics)
    )
    while some := [*islice(measured, LINES_AT_ONCE)]:
        rows = [{"step": one.step, "time": round(1000 * one.time), **one.metrics} for one in some]
        frames.append(pl.from_dicts(rows, schema_overrides=kinds, infer_schema_length=None))
    lines = pl.concat(frames, how="diagonal")
    parts = []
    for is_held_out in (False, True):
        names = [one for one in lines.columns if one.startswith(EVAL) == is_held_out]
        names = [one for one in names if one not in kinds]
        holds_one = pl.any_horizontal(pl.lit(False), *(pl.col(one).is_not_null() for one in names))
        parts.append(lines.filter(holds_one).select(*kinds, *names))
    return History(*parts)


def curves(lines: pl.DataFrame, prefix: str = "") -> Mapping[str, list[tuple[float, float]]]:
    """The (step, value) points of every metric with this prefix, by its name without it."""
    return {
        name.removeprefix(prefix): lines.select("step", name).drop_nulls().rows()
        for name in lines.columns
        if name not in RESERVED and name.startswith(prefix)
    }
