"""The warnings about a run: signs in its metrics of a model that got worse.

Each is a function of the run's measurements. It returns one sentence, or None if there is no
problem or too little data. An effect must be large and significant; docs/training.md lists the
thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ...schemas.errors import UsageError
from .charts import Curves, Point
from .eval_table import BAD, GOOD
from .intervals import interval_of_mean
from .two_runs import ALPHA, compare, correct_rows, margins_by_row, measure_of, unit_of

FEWEST_LINES = 20
FEWEST_ROWS = 20  # a bootstrap interval of fewer rows is unreliable
LEAST_FALL = 1.0  # nats per completion
SATURATED = 0.99
LEAST_GAP = 0.1  # between the accuracies of two kinds of pairs
RARE = 0.01


@dataclass(frozen=True)
class Measurements:
    """The curves of a run, and its tables of held-out completions by step."""

    learned: Curves
    held_out: Curves = field(default_factory=dict)
    tables: Mapping[int, pl.DataFrame] = field(default_factory=dict)

    def first_and_last(self) -> tuple[pl.DataFrame, pl.DataFrame] | None:
        """The first and the last table, if both have good and bad completions."""
        if len(self.tables) < 2:
            return None
        first, last = self.tables[min(self.tables)], self.tables[max(self.tables)]
        return (first, last) if _has_both(first) and _has_both(last) else None


def displacement(run: Measurements) -> str | None:
    """Chosen completions become less likely while margins grow."""
    ends = run.first_and_last()
    unit = unit_of(ends) if ends else ""
    if not ends or not unit:
        return None
    first, last = (_row_means(table, GOOD, "logp") for table in ends)
    both = first.join(last, on="row_id", suffix="_last")
    falls = (both["logp_last"] - both["logp"]).to_numpy()
    falls = falls[np.isfinite(falls)]
    first, last = (margins_by_row(table, unit, unit) for table in ends)
    both = first.join(last, on=["row_id", "sides"], suffix="_last")
    gains = (both["margin_last"] - both["margin"]).to_numpy()
    if min(len(falls), len(gains)) < FEWEST_ROWS:
        return None
    low, high = _interval(falls)
    if falls.mean() > -LEAST_FALL or high >= 0 or _interval(gains)[0] <= 0:
        return None
    return (
        f"Chosen completions became less likely, by {-falls.mean():.2f} nats on average (95 % "
        f"interval {-high:.2f} to {-low:.2f}), while the margins grew. If answers get worse, add "
        "an SFT term with --set method.sft_weight=0.1, or lower train.lr."
    )


def kl_at_zero(run: Measurements) -> str | None:
    """KTO's reference point stays clamped at 0, far above its raw value."""
    clamped = _values(run.learned.get("kl/clamped", ()))
    positive = np.flatnonzero(clamped)
    zeros = len(clamped) - (int(positive[-1]) + 1 if len(positive) else 0)
    if zeros < FEWEST_LINES:
        return None
    raw = _values(run.learned.get("kl/raw", ()))[-zeros:]
    if not len(raw) or raw.mean() > -LEAST_FALL:  # a policy near its reference is near 0
        return None
    return (
        f"KTO's reference point is 0 in the last {zeros:,} logged lines ({raw.mean():.2f} nats "
        "before the clamp): all answers become less likely, and the loss compares them with the "
        "reference alone. Lower train.lr, or raise method.beta."
    )


def saturation(run: Measurements) -> str | None:
    """Nearly all training rows are correct."""
    values = _values(run.learned.get("rewards/accuracies", ()))
    if len(values) < FEWEST_LINES:
        return None
    share = values[-max(len(values) // 4, FEWEST_LINES // 2) :].mean()
    if share < SATURATED:
        return None
    own = run.held_out.get("rewards/accuracies", ())
    beside = f" and {own[-1][1]:.1%} of the held-out ones" if own else ""
    return (
        f"{share:.1%} of the training rows in the last quarter{beside} are correct, so little is "
        "left to learn. Train for fewer epochs, or check the data for an easy difference between "
        "good and bad completions, such as length."
    )


def length(run: Measurements) -> str | None:
    """Pairs are correct more often if their chosen completion is the longer one."""
    if not run.tables:
        return None
    last = run.tables[max(run.tables)]
    if not _has_both(last):
        return None
    value = measure_of([last], {""})
    if value == "logp":  # a log-prob falls with length by itself
        return None
    good, bad = (_row_means(last, roles, "tokens", value) for roles in (GOOD, BAD))
    pairs = good.join(bad, on="row_id", suffix="_bad")
    pairs = pairs.filter((pairs[value] - pairs[f"{value}_bad"]).is_finite())
    correct = (pairs[value] > pairs[f"{value}_bad"]).to_numpy()
    extra = (pairs["tokens"] - pairs["tokens_bad"]).to_numpy()
    longer, shorter = correct[extra > 0], correct[extra < 0]
    if min(len(longer), len(shorter)) < FEWEST_ROWS:
        return None
    gap = longer.mean() - shorter.mean()
    pooled = np.concatenate([longer, shorter]).mean()
    error = math.sqrt(pooled * (1 - pooled) * (1 / len(longer) + 1 / len(shorter)))
    if gap < LEAST_GAP or math.erfc(gap / error / math.sqrt(2)) > RARE:
        return None
    return (
        f"{longer.mean():.0%} of the held-out pairs with a longer chosen completion are correct, "
        f"but only {shorter.mean():.0%} of those with a shorter one, so answers are likely to get "
        "longer. Balance the lengths in the data, or use a loss of mean log-probs, such as simpo."
    )


def past_its_best(run: Measurements) -> str | None:
    """The last evaluation is significantly worse than an earlier one."""
    tables = {step: table for step, table in run.tables.items() if _has_both(table)}
    if len(tables) < 2 or max(tables) != max(run.tables):
        return None
    measure = measure_of([*tables.values()], {""})
    correct = {step: correct_rows(table, measure) for step, table in tables.items()}
    if min(map(len, correct.values())) < FEWEST_ROWS:
        return None
    last, best = max(tables), max(correct, key=lambda step: (correct[step].mean(), step))
    if best == last:
        return None
    found = compare(tables[best], tables[last], measure)
    # The same rows choose the best and test it, so all evaluations share the 5 %.
    is_noise = found.p_value >= ALPHA / (len(tables) - 1)
    if is_noise or found.prompts_lost <= found.prompts_gained:
        return None
    return (
        f"{found.accuracy.first:.1%} of the held-out rows are correct after step {best:,}, but "
        f"only {found.accuracy.second:.1%} at the end, which is significantly worse. Keep the best "
        "with --set train.best=eval/rewards/accuracies, or train for fewer steps."
    )


WARNINGS: Mapping[str, Callable[[Measurements], str | None]] = {
    "displacement": displacement,
    "KL at 0": kl_at_zero,
    "saturation": saturation,
    "length": length,
    "past its best": past_its_best,
}


def find_warnings(run: Measurements) -> dict[str, str]:
    """The warnings about a run, by their names."""
    found = dict[str, str]()
    for name, warning in WARNINGS.items():
        try:
            sentence = warning(run)
        except UsageError:  # rows with one label and no reference have no accuracy
            continue
        if sentence:
            found[name] = sentence
    return found


def _has_both(table: pl.DataFrame) -> bool:
    """Whether the table has good and bad completions and no others."""
    roles = {*table["role"]}
    return bool(roles & {*GOOD} and roles & {*BAD}) and roles <= {*GOOD, *BAD}


def _row_means(table: pl.DataFrame, roles: Sequence[str], *columns: str) -> pl.DataFrame:
    """Each row's mean over its completions with these roles."""
    own = table.filter(table["role"].is_in(roles))
    return own.select("row_id", *columns).group_by("row_id").mean()


def _values(points: Sequence[Point]) -> NDArray[np.float64]:
    return np.array([value for _, value in points], dtype=np.float64)


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    # Sorted, so that the interval does not depend on the order of the table's rows.
    return interval_of_mean(np.sort(values), np.arange(len(values)))
