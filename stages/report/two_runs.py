"""Two runs on the same held-out rows: which rows flip, and whether chance explains it.

A row is right if the measure of its chosen or desirable side is above that of the other; a row with
one side only, if that is above or below 0 as its label says. The measure is the reward that the
loss compares where both runs have the same one, else the log-ratio or the log-prob.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ...schemas.errors import UsageError
from .eval_table import BAD, COLUMNS, GOOD, REWARD
from .intervals import interval_of_mean, mcnemar

ALPHA = 0.05
BOTH_SIDES = 4  # of a row: 1 for a bad side, and 3 for a good one


@dataclass(frozen=True)
class Difference:
    """A mean over the rows of each run, and the 95 % interval of what the second gains."""

    name: str
    rows: int
    first: float
    second: float
    low: float
    high: float


@dataclass(frozen=True)
class TwoRuns:
    """The results of two runs on the rows that both have."""

    accuracy: Difference
    gap: Difference | None  # of log-ratios or log-probs; None: both are reward models
    gained: tuple[str, ...]  # ids of the rows that only the second has right
    lost: tuple[str, ...]
    prompts_gained: int  # prompts of which the second has more rows right; each counts once
    prompts_lost: int
    in_both: int  # rows that both have right
    left_out: int  # rows that one of them lacks, or has no finite number for
    p_value: float  # that chance alone divides these prompts as unevenly


def unit_of(tables: Sequence[pl.DataFrame]) -> str:
    """The column in nats that all tables have; empty if there is none."""
    shared = set.intersection(*({*table.columns} for table in tables))
    return next((name for name in ("log_ratio", "logp") if name in shared), "")


def measure_of(tables: Sequence[pl.DataFrame], formulas: Collection[str]) -> str:
    """The column by which rows are right or wrong in all tables."""
    shared = set.intersection(*({*table.columns} for table in tables))
    is_same = len({*formulas}) == 1 and REWARD in shared
    found = REWARD if is_same else unit_of(tables) or COLUMNS["scores"][-1]
    if found not in shared:
        raise UsageError(
            "The scores of a reward model and the log-probs of a policy have no measure in common. "
            "Compare runs of one kind."
        )
    return found


def compare(first: pl.DataFrame, second: pl.DataFrame, measure: str = REWARD) -> TwoRuns:
    """Compares two tables of single held-out completions, row by row."""
    unit = unit_of((first, second))
    sides = [row_gaps(table, measure, unit or measure) for table in (first, second)]
    both = sides[0].join(sides[1], on=["row_id", "sides"], suffix="_second").sort("row_id")
    if both.is_empty():
        raise UsageError(
            "The two runs have no held-out row in common. Give both the same train.eval_cache, or "
            "the same cache, train.eval_fraction and train.seed."
        )
    prompts, ids = both["prompt_key"].to_numpy(), both["row_id"].to_numpy()

    def difference(name: str, one: NDArray[Any], other: NDArray[Any]) -> Difference:
        low, high = interval_of_mean(other - one, prompts)
        return Difference(name, len(one), float(one.mean()), float(other.mean()), low, high)

    right = [_is_right(both[name].to_numpy()) for name in ("value", "value_second")]
    gaps = [both[name].to_numpy() for name in ("gap", "gap_second")]
    flips = right[1] - right[0]
    # Rows of one prompt flip together, so each prompt counts once, for the side that has more.
    _, prompt = np.unique(prompts, return_inverse=True)
    balance = np.bincount(prompt, (flips == 1).astype(float) - (flips == -1))
    prompts_gained, prompts_lost = int((balance > 0).sum()), int((balance < 0).sum())
    return TwoRuns(
        accuracy=difference("accuracy", *right),
        gap=difference(unit, *gaps) if unit else None,
        gained=tuple(ids[flips == 1].tolist()),
        lost=tuple(ids[flips == -1].tolist()),
        prompts_gained=prompts_gained,
        prompts_lost=prompts_lost,
        in_both=int(((right[0] == 1) & (right[1] == 1)).sum()),
        left_out=len({*first["row_id"], *second["row_id"]}) - len(both),
        p_value=mcnemar(prompts_lost, prompts_gained),
    )


def right_rows(samples: pl.DataFrame, measure: str) -> NDArray[np.float64]:
    """1 for each row of a table that is right, 0 for one that is wrong, and 0.5 for a tie."""
    return _is_right(row_gaps(samples, measure, measure)["value"].to_numpy())


def row_gaps(samples: pl.DataFrame, measure: str, unit: str) -> pl.DataFrame:
    """Each row's mean of the good side less that of the bad: `value` in the measure, `gap` in nats.

    `sides` says which sides the row has.
    """
    if others := {*samples["role"]} - {*GOOD, *BAD}:
        raise UsageError(
            f"Completions with the role {min(others)} are neither good nor bad, so no row is right "
            "or wrong. Compare runs on pairs or on labelled rows."
        )
    means = samples.group_by("row_id", pl.col("role").is_in(GOOD).alias("is_good")).agg(
        pl.col("prompt_key").first(),
        pl.col(measure).mean().alias("value"),
        pl.col(unit).mean().alias("gap"),
    )
    sign = pl.when("is_good").then(1.0).otherwise(-1.0)
    rows = means.group_by("row_id").agg(
        pl.col("prompt_key").first(),
        (pl.col("is_good").sum() * 2 + pl.len()).alias("sides"),
        (pl.col("value", "gap") * sign).sum(),
    )
    if measure == "logp":  # which is below 0 whatever the label is
        rows = rows.filter(pl.col("sides") == BOTH_SIDES)
        if rows.is_empty():
            raise UsageError("Without a reference a row needs a good and a bad side to be right.")
    return rows.filter(pl.col("value").is_finite() & pl.col("gap").is_finite())


def _is_right(gaps: NDArray[Any]) -> NDArray[np.float64]:
    return np.where(gaps > 0, 1.0, np.where(gaps < 0, 0.0, 0.5))
