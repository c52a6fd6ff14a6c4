"""Compares two runs on the same held-out rows: which rows flip, and whether it is significant.

A row is correct if its good completions (chosen, desirable) have a higher value than its bad ones.
A row with one label only is correct if the value is above 0 for a good label and below 0 for a bad
one. The value is the reward that the loss compares if both runs have the same one, else the
log-ratio or the log-prob.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ...schemas.errors import UsageError
from .eval_table import BAD, COLUMNS, GOOD, REWARD
from .intervals import interval_of_mean, mcnemar

ALPHA = 0.05
HAS_BOTH = 4  # `sides` of a row with good (3) and bad (1) completions


@dataclass(frozen=True)
class Difference:
    """The mean of each run over the rows, and the 95 % interval of second minus first."""

    name: str
    rows: int
    first: float
    second: float
    low: float
    high: float


@dataclass(frozen=True)
class TwoRuns:
    """The results of two runs on their common rows."""

    accuracy: Difference
    margin: Difference | None  # of log-ratios or log-probs; None for reward models
    gained: tuple[str, ...]  # ids of the rows that are correct only in the second run
    lost: tuple[str, ...]
    prompts_gained: int  # prompts with more correct rows in the second run; each counts once
    prompts_lost: int
    correct_in_both: int  # rows
    left_out: int  # rows that one run lacks or has no finite value for
    p_value: float  # of McNemar's test on the gained and lost prompts


def unit_of(tables: Sequence[pl.DataFrame]) -> str:
    """The column in nats that all tables share; empty if there is none."""
    shared = set.intersection(*({*table.columns} for table in tables))
    return next((name for name in ("log_ratio", "logp") if name in shared), "")


def measure_of(tables: Sequence[pl.DataFrame], formulas: Collection[str]) -> str:
    """The column that decides in all tables whether a row is correct."""
    shared = set.intersection(*({*table.columns} for table in tables))
    is_same = len({*formulas}) == 1 and REWARD in shared
    found = REWARD if is_same else unit_of(tables) or COLUMNS["scores"][-1]
    if found not in shared:
        raise UsageError(
            "A reward model's scores cannot be compared with a policy's log-probs. Compare two "
            "reward models or two policies."
        )
    return found


def compare(first: pl.DataFrame, second: pl.DataFrame, measure: str = REWARD) -> TwoRuns:
    """Compares two tables of held-out completions row by row."""
    unit = unit_of((first, second))
    margins = [margins_by_row(table, measure, unit or measure) for table in (first, second)]
    both = margins[0].join(margins[1], on=["row_id", "sides"], suffix="_second").sort("row_id")
    if both.is_empty():
        raise UsageError(
            "The two runs have no common held-out rows. Train both with the same train.eval_cache, "
            "or with the same cache, train.eval_fraction and train.seed."
        )
    prompts, ids = both["prompt_key"].to_numpy(), both["row_id"].to_numpy()

    def difference(name: str, one: NDArray[Any], other: NDArray[Any]) -> Difference:
        low, high = interval_of_mean(other - one, prompts)
        return Difference(name, len(one), float(one.mean()), float(other.mean()), low, high)

    correct = [_is_correct(both[name].to_numpy()) for name in ("value", "value_second")]
    in_nats = [both[name].to_numpy() for name in ("margin", "margin_second")]
    flips = correct[1] - correct[0]
    # Rows of one prompt flip together, so each prompt counts once, for the run with more of them.
    _, prompt = np.unique(prompts, return_inverse=True)
    balance = np.bincount(prompt, (flips == 1).astype(float) - (flips == -1))
    prompts_gained, prompts_lost = int((balance > 0).sum()), int((balance < 0).sum())
    return TwoRuns(
        accuracy=difference("accuracy", *correct),
        margin=difference(unit, *in_nats) if unit else None,
        gained=tuple(ids[flips == 1].tolist()),
        lost=tuple(ids[flips == -1].tolist()),
        prompts_gained=prompts_gained,
        prompts_lost=prompts_lost,
        correct_in_both=int(((correct[0] == 1) & (correct[1] == 1)).sum()),
        left_out=len({*first["row_id"], *second["row_id"]}) - len(both),
        p_value=mcnemar(prompts_lost, prompts_gained),
    )


def correct_rows(samples: pl.DataFrame, measure: str) -> NDArray[np.float64]:
    """1 for each correct row of a table, 0 for an incorrect one, and 0.5 for a tie."""
    return _is_correct(margins_by_row(samples, measure, measure)["value"].to_numpy())


def intervals_of(
    samples: pl.DataFrame, metrics: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """The 95 % intervals of a held-out set's metrics, by the bootstrap over prompts.

    A metric that is no mean over these rows has none.
    """
    if REWARD not in samples.columns or {*samples["role"]} - {*GOOD, *BAD}:
        return {}
    rows = margins_by_row(samples, REWARD, REWARD).sort("row_id")
    margins, found = rows["value"].to_numpy(), {}
    # Ties are margins within their rounding, which the table lacks: the smallest ones.
    ties = round(metrics.get("rewards/ties", 0.0) * len(margins))
    correct = _is_correct(margins)
    correct[np.argsort(np.abs(margins), kind="stable")[:ties]] = 0.5
    good, bad = (samples.filter(pl.col("role").is_in(roles)) for roles in (GOOD, BAD))
    for name, values, prompts in (
        ("rewards/accuracies", correct, rows["prompt_key"]),
        ("rewards/margins", margins, rows["prompt_key"]),
        ("rewards/chosen", good[REWARD].to_numpy(), good["prompt_key"]),
        ("rewards/rejected", bad[REWARD].to_numpy(), bad["prompt_key"]),
    ):
        if name in metrics and math.isclose(np.mean(values), metrics[name], abs_tol=1e-9):
            found[name] = interval_of_mean(values, prompts.to_numpy())
    return found


def margins_by_row(samples: pl.DataFrame, measure: str, unit: str) -> pl.DataFrame:
    """Per row, the mean of its good minus that of its bad completions: `value` and `margin`.

    `value` is in the measure and `margin` in the unit, which is nats. `sides` is 3 if the row has
    good completions, plus 1 if it has bad ones.
    """
    if others := {*samples["role"]} - {*GOOD, *BAD}:
        raise UsageError(
            f"Completions with the role {min(others)} are neither good nor bad, so they have no "
            "accuracy. Compare runs on pairs or on labelled rows."
        )
    means = samples.group_by("row_id", pl.col("role").is_in(GOOD).alias("is_good")).agg(
        pl.col("prompt_key").first(),
        pl.col(measure).mean().alias("value"),
        pl.col(unit).mean().alias("margin"),
    )
    sign = pl.when("is_good").then(1.0).otherwise(-1.0)
    rows = means.group_by("row_id").agg(
        pl.col("prompt_key").first(),
        (pl.col("is_good").sum() * 2 + pl.len()).alias("sides"),
        (pl.col("value", "margin") * sign).sum(),
    )
    if measure == "logp":  # a log-prob is always below 0, so one label alone decides nothing
        rows = rows.filter(pl.col("sides") == HAS_BOTH)
        if rows.is_empty():
            raise UsageError(
                "Without reference log-probs, accuracy needs rows with a good and a bad "
                "completion. Compare runs on pairs."
            )
    return rows.filter(pl.col("value").is_finite() & pl.col("margin").is_finite())


def _is_correct(margins: NDArray[Any]) -> NDArray[np.float64]:
    return np.where(margins > 0, 1.0, np.where(margins < 0, 0.0, 0.5))
