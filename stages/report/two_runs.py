"""Two runs on the same held-out rows: which rows flip, and whether chance explains it.

A row is right where the measure of what is chosen or desirable is above that of what is not; of a
row with one side only, it has to be above or below 0. The measure is the reward that the loss
compares, if it is the same in both, and else the log-ratio or the log-prob.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...schemas.errors import UsageError
from .eval_table import BAD, COLUMNS, GOOD, REWARD
from .intervals import interval_of_mean, mcnemar

if TYPE_CHECKING:
    import polars as pl

SURE = 0.05
BOTH_SIDES = 4  # 1 of a bad side alone, and 3 of a good one


@dataclass(frozen=True)
class Difference:
    """A mean over some rows in each of two runs, and the 95 % interval of what the second gains."""

    name: str
    rows: int
    first: float
    second: float
    low: float
    high: float


@dataclass(frozen=True)
class TwoRuns:
    """What two runs make of the rows that both have."""

    accuracy: Difference
    gap: Difference | None  # of log-ratios or log-probs; none of two reward models
    gained: tuple[str, ...]  # ids of the rows that only the second has right
    lost: tuple[str, ...]
    in_both: int  # rows that both have right
    left_out: int  # rows that one of them lacks, or has no finite number for
    chance: float  # that prompts whose rows are flipped by chance alone divide as unevenly

    @property
    def are_told_apart(self) -> bool:
        """Whether chance is a poor explanation."""
        return self.chance < SURE


def measure_of(tables: Sequence[pl.DataFrame], formulas: Collection[str]) -> str:
    """The column by which rows are right or wrong in all of these tables."""
    shared = set.intersection(*({*table.columns} for table in tables))
    is_same = len({*formulas}) == 1 and REWARD in shared
    found = REWARD if is_same else unit_of(tables) or COLUMNS["scores"][-1]
    if found not in shared:
        raise UsageError(
            "The scores of a reward model and the log-probs of a policy have no measure in common. "
            "Compare runs of one kind."
        )
    return found


def unit_of(tables: Sequence[pl.DataFrame]) -> str:
    """The column in which all can be told in nats; empty if there is none."""
    shared = set.intersection(*({*table.columns} for table in tables))
    return next((name for name in ("log_ratio", "logp") if name in shared), "")


def compare(first: pl.DataFrame, second: pl.DataFrame, measure: str = REWARD) -> TwoRuns:
    """Compares two tables of single held-out completions, row by row.

    Rows of one prompt are drawn together.
    """
    unit = unit_of((first, second))
    both, left_out = _joined(first, second, {"right": measure, "gap": unit or measure})
    ids = both["row_id"].to_list()
    units = _numbered(both["prompt_key"].to_list())
    right = [_is_right(both[name].to_numpy()) for name in ("right", "right_second")]
    flips = right[1] - right[0]
    gaps = [both[name].to_numpy() for name in ("gap", "gap_second")]
    # Rows of one prompt flip together, so each prompt counts once, to the side that has more.
    sides = np.sign(np.bincount(units, (flips == 1).astype(float) - (flips == -1)))
    return TwoRuns(
        accuracy=_difference("accuracy", right[0], right[1], units),
        gap=_difference(unit, gaps[0], gaps[1], units) if unit else None,
        gained=tuple(ids[row] for row in np.flatnonzero(flips == 1)),
        lost=tuple(ids[row] for row in np.flatnonzero(flips == -1)),
        in_both=int(((right[0] == 1) & (right[1] == 1)).sum()),
        left_out=left_out,
        chance=mcnemar(int((sides < 0).sum()), int((sides > 0).sum())),
    )


def right_rows(samples: pl.DataFrame, measure: str) -> NDArray[np.float64]:
    """1 for each row of a table that is right, 0 for one that is wrong, and 0.5 for a tie."""
    rows = rows_of(samples, {"right": measure, "gap": measure})
    return _is_right(rows["right"].to_numpy())


def _numbered(prompts: Sequence[str]) -> NDArray[np.int64]:
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts])


def _joined(
    first: pl.DataFrame, second: pl.DataFrame, told: Mapping[str, str]
) -> tuple[pl.DataFrame, int]:
    """A line for each row that both have, and how many others there are."""
    sides = [rows_of(table, told) for table in (first, second)]
    both = sides[0].join(sides[1], on=["row_id", "sides"], suffix="_second").sort("row_id")
    if both.is_empty():
        raise UsageError(
            "The two runs have no held-out row in common. Give both the same train.eval_cache, or "
            "the same cache, train.eval_fraction and train.seed."
        )
    every = {*first["row_id"], *second["row_id"]}
    return both, len(every) - len(both)


def rows_of(samples: pl.DataFrame, told: Mapping[str, str]) -> pl.DataFrame:
    """Each row's mean of the good side less that of the bad one, in each of the columns `told`."""
    import polars as pl  # noqa: PLC0415 - 20 MiB that a rank without a report does not need

    roles = {*samples["role"]}
    if others := roles - {*GOOD, *BAD}:
        raise UsageError(
            f"Completions with the role {min(others)} are neither good nor bad, so no row is right "
            "or wrong. Compare runs on pairs or on labelled rows."
        )
    means = samples.group_by("row_id", pl.col("role").is_in(GOOD).alias("is_good")).agg(
        pl.col("prompt_key").first(),
        *(pl.col(column).mean().alias(name) for name, column in told.items()),
    )
    sign = pl.when("is_good").then(1.0).otherwise(-1.0)
    rows = means.group_by("row_id").agg(
        pl.col("prompt_key").first(),
        (pl.col("is_good").sum() * 2 + pl.len()).alias("sides"),
        *((pl.col(name) * sign).sum() for name in told),
    )
    if told["right"] == "logp":  # which is below 0 whatever the label is
        rows = rows.filter(pl.col("sides") == BOTH_SIDES)
        if rows.is_empty():
            raise UsageError("Without a reference a row needs a good and a bad side to be right.")
    return rows.filter(pl.col("right").is_finite() & pl.col("gap").is_finite())


def _is_right(gaps: NDArray[Any]) -> NDArray[np.float64]:
    """1 for a row that is right, 0 for one that is wrong, 0.5 for a tie."""
    return np.where(gaps > 0, 1.0, np.where(gaps < 0, 0.0, 0.5))


def _difference(
    name: str, first: NDArray[Any], second: NDArray[Any], units: NDArray[Any]
) -> Difference:
    low, high = interval_of_mean(second - first, units)
    return Difference(name, len(first), float(first.mean()), float(second.mean()), low, high)
