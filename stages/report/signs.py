"""What stands out in a run, in words: signs that are known to go with a model that is not wanted.

Each sign is a function in `SIGNS`, of what a run has measured. It answers None where it is not
there, or there is too little to tell. Thresholds are of size and of chance: what is small or may be
noise is not said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...schemas.errors import UsageError
from .charts import Metrics, Point
from .eval_table import BAD, GOOD
from .intervals import interval_of_mean
from .two_runs import SURE, compare, measure_of, right_rows, rows_of, unit_of

if TYPE_CHECKING:
    import polars as pl

FEWEST_LINES = 20
FEWEST = 20  # rows: the interval of fewer is wide and not to be trusted
LEAST_FALL = 1.0  # nats of a whole completion
SATURATED = 0.99
LEAST_ODDS = 0.1  # between the accuracies of two kinds of pairs
RARE = 0.01


@dataclass(frozen=True)
class Evidence:
    """What a run has measured: its curves, and tables of single held-out completions by step."""

    learned: Metrics
    held_out: Metrics = field(default_factory=dict)
    tables: Mapping[int, pl.DataFrame] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[pl.DataFrame, pl.DataFrame] | None:
        """The first table and the last, if both can tell good from bad."""
        if len(self.tables) < 2:
            return None
        first, last = (self.tables[of(self.tables)] for of in (min, max))
        return (first, last) if _has_both(first) and _has_both(last) else None


@dataclass(frozen=True)
class Sign:
    """One that is there: what is seen of it, and what to try."""

    name: str
    said: str
    hint: str


Words = tuple[str, str]  # what is seen, and what to try


def look_for_signs(seen: Evidence) -> tuple[Sign, ...]:
    """The signs that are there."""
    told = {name: _told(look, seen) for name, look in SIGNS.items()}
    return tuple(Sign(name, *words) for name, words in told.items() if words)


def _told(look: Callable[[Evidence], Words | None], seen: Evidence) -> Words | None:
    try:
        return look(seen)
    except UsageError:  # such rows cannot tell, as single labels without a reference
        return None


def displacement(seen: Evidence) -> Words | None:
    """Chosen completions become less likely while margins grow."""
    if not seen.ends or not (unit := unit_of(seen.ends)):
        return None
    chosen = [_means(table, GOOD, "logp") for table in seen.ends]
    both = chosen[0].join(chosen[1], on="row_id", suffix="_last")
    falls = _finite((both["logp_last"] - both["logp"]).to_numpy())
    rows = [rows_of(table, {"right": unit, "gap": unit}) for table in seen.ends]
    gaps = rows[0].join(rows[1], on=["row_id", "sides"], suffix="_last")
    gains = (gaps["gap_last"] - gaps["gap"]).to_numpy()
    if min(len(falls), len(gains)) < FEWEST:
        return None
    low, high = _interval(falls)
    if not (falls.mean() < -LEAST_FALL and high < 0 < _interval(gains)[0]):
        return None
    return (
        f"Chosen completions have become less likely, by {-falls.mean():.2f} nats each (95 %: "
        f"{-high:.2f} to {-low:.2f}), while the margins grew.",
        "If answers get worse, add train on what is chosen: --set method.sft_weight=0.1, or a "
        "lower learning rate.",
    )


def kl_at_zero(seen: Evidence) -> Words | None:
    """The reference point of KTO stays at 0."""
    points = seen.learned.get("kl/clamped", ())
    if len(points) < FEWEST_LINES:
        return None
    zeros = next((at for at, (_, value) in enumerate(reversed(points)) if value), len(points))
    if zeros < FEWEST_LINES:
        return None
    raw = _values(seen.learned.get("kl/raw", ()))[-zeros:]
    mean = f" (its mean before the clamp: {raw.mean():.2f} nats)" if len(raw) else ""
    return (
        f"KTO's reference point is 0 in the last {zeros:,} lines{mean}, so losses compare with "
        "the reference alone.",
        "A mean far below 0 says that all answers become less likely: lower train.lr, or raise "
        "method.beta.",
    )


def saturated(seen: Evidence) -> Words | None:
    """Nearly all training rows are right."""
    values = _values(seen.learned.get("rewards/accuracies", ()))
    if len(values) < FEWEST_LINES:
        return None
    share = values[-max(len(values) // 4, FEWEST_LINES // 2) :].mean()
    if share < SATURATED:
        return None
    own = seen.held_out.get("rewards/accuracies", ())
    beside = f", and {own[-1][1]:.1%} of the held-out ones" if own else ""
    return (
        f"In the last quarter {share:.1%} of the training rows are right{beside}: little is left "
        "to learn.",
        "Train for fewer epochs, or look for an easy way to tell the sides apart, such as length.",
    )


def length(seen: Evidence) -> Words | None:
    """The longer side is held for the better one more often than it is."""
    if not seen.tables or not _has_both(last := seen.tables[max(seen.tables)]):
        return None
    if (value := measure_of([last], {""})) == "logp":  # which is lower the longer a side is
        return None
    good, bad = (_means(last, roles, "tokens", value) for roles in (GOOD, BAD))
    pairs = good.join(bad, on="row_id", suffix="_bad")
    pairs = pairs.filter((pairs[value] - pairs[f"{value}_bad"]).is_finite())
    right = (pairs[value] > pairs[f"{value}_bad"]).to_numpy()
    more = (pairs["tokens"] - pairs["tokens_bad"]).to_numpy()
    longer, shorter = right[more > 0], right[more < 0]
    if min(len(longer), len(shorter)) < FEWEST:
        return None
    gap = longer.mean() - shorter.mean()
    pooled = np.concatenate([longer, shorter]).mean()
    error = math.sqrt(pooled * (1 - pooled) * (1 / len(longer) + 1 / len(shorter)))
    if gap < LEAST_ODDS or math.erfc(gap / error / math.sqrt(2)) > RARE:
        return None
    return (
        f"Of held-out pairs {longer.mean():.0%} are right where the chosen side is longer, and "
        f"{shorter.mean():.0%} where it is shorter: answers are likely to grow.",
        "Balance the lengths in the data, or use a loss of mean log-probs, such as simpo.",
    )


def past_best(seen: Evidence) -> Words | None:
    """The end is worse than an evaluation before, by more than noise."""
    tables = {step: one for step, one in seen.tables.items() if _has_both(one)}
    if len(tables) < 2 or max(tables) != max(seen.tables):
        return None
    measure = measure_of([*tables.values()], {""})
    right = {step: right_rows(one, measure) for step, one in tables.items()}
    last = max(tables)
    if min(map(len, right.values())) < FEWEST:
        return None
    best = max(right, key=lambda step: (right[step].mean(), step))
    if best == last:
        return None
    found = compare(tables[best], tables[last], measure)
    # The best is chosen by the same rows, so all evaluations share the 5 %.
    is_noise = found.chance >= SURE / (len(tables) - 1)
    if is_noise or len(found.lost) <= len(found.gained):
        return None
    return (
        f"After step {best:,} {found.accuracy.first:.1%} of the held-out rows are right, at the "
        f"end {found.accuracy.second:.1%}, which is worse by more than noise.",
        "Keep the best: --set train.best=eval/rewards/accuracies, or train for fewer steps.",
    )


SIGNS: Mapping[str, Callable[[Evidence], Words | None]] = {
    "displacement": displacement,
    "KL at 0": kl_at_zero,
    "saturation": saturated,
    "length": length,
    "past its best": past_best,
}


def _has_both(table: pl.DataFrame) -> bool:
    """Whether there are good and bad completions, and no others."""
    roles = {*table["role"]}
    return bool(roles & {*GOOD} and roles & {*BAD}) and roles <= {*GOOD, *BAD}


def _means(table: pl.DataFrame, roles: Sequence[str], *columns: str) -> pl.DataFrame:
    """Each row's mean of its completions with these roles, in some columns."""
    own = table.filter(table["role"].is_in(roles))
    return own.select("row_id", *columns).group_by("row_id").mean()


def _values(points: Sequence[Point]) -> NDArray[np.float64]:
    return np.array([value for _, value in points], dtype=np.float64)


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[np.isfinite(values)]


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    # Sorted: tables give their rows in any order, and a bootstrap draws places.
    return interval_of_mean(np.sort(values), np.arange(len(values)))
