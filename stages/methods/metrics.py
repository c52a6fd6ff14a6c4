"""Rewards of completions, and their metrics: margins, accuracies, ties."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...schemas.methods import Completions, Mean, Metric, RowKind
from .method import is_good
from .tensors import Tensor, torch

MARGINS = "rewards/margins"
# The reward of each completion, (completions,), by its formula, after the loss's modifiers.
REWARDS: dict[str, Callable[[Completions, Any], Tensor]] = {
    "b r": lambda of, o: of.ratios * o.beta,
    "b r, margins and accuracies of b d": lambda of, o: of.ratios * o.beta,
    "b r/n": lambda of, o: of.ratios * o.beta / of.num_tokens,
    "b r/n, or b r with normalize sum": lambda of, o: (
        of.ratios * o.beta / (of.num_tokens if o.normalize == "mean" else 1)
    ),
    "lam m": lambda of, o: o.lam * of.logps / of.num_tokens,
    "b m": lambda of, o: o.beta * of.compared_logps / of.num_tokens,
    "b lp": lambda of, o: o.beta * of.logps,
    "lp": lambda of, _: of.compared_logps,
    "s": lambda of, _: of.logps,
    "r": lambda of, _: of.ratios,
    "r, or r/n with normalize sequence": lambda of, o: (
        of.ratios / (of.num_tokens if o.normalize == "sequence" else 1)
    ),
}


def reward_metrics(
    rewards: Tensor,
    rounding: Tensor,
    completions: Completions,
    kind: RowKind,
    margins: Tensor | None,
) -> dict[str, Metric]:
    """The reward metrics of a micro-batch of rows of this kind.

    Every row, completion or pair of candidates counts the same, whatever its `row_weight`.
    `rounding`, (completions,), is the change of each reward if its log-prob changes by its
    rounding. `margins` replaces the differences of a pair's rewards.
    """
    if kind == "paired":
        chosen, rejected = rewards[0::2], rewards[1::2]
        gaps = chosen - rejected if margins is None else margins
        rates = compared(gaps, rounding[0::2] + rounding[1::2])
        return {"rewards/chosen": chosen, "rewards/rejected": rejected, MARGINS: gaps, **rates}
    if kind == "grouped":
        rows, given = completions.rows, completions.scores
        is_pair = (rows[:, None] == rows) & (given[:, None] > given)
        return compared(rewards[:, None] - rewards, rounding[:, None] + rounding, is_pair)
    good = is_good(completions)
    # A row with both labels is correct if its desirable completions have the higher mean.
    values = torch.stack([rewards, rounding])
    desirable, undesirable = (_means_by_row(values, completions.rows, one) for one in (good, ~good))
    has_both = desirable[0].isfinite() & undesirable[0].isfinite()
    return {
        "rewards/chosen": Mean.of(rewards, good),
        "rewards/rejected": Mean.of(rewards, ~good),
        **compared(desirable[0] - undesirable[0], desirable[1] + undesirable[1], has_both),
    }


def compared(gaps: Tensor, rounding: Tensor, is_counted: Tensor | None = None) -> dict[str, Metric]:
    """The accuracy of the gaps, where a tie counts as half, and the rate of ties."""
    rates = {
        "rewards/accuracies": higher(gaps, rounding),
        "rewards/ties": is_tie(gaps, rounding).double(),
    }
    if is_counted is None:
        return {**rates}
    return {name: Mean.of(values, is_counted) for name, values in rates.items()}


def higher(gaps: Tensor, rounding: Tensor) -> Tensor:
    """1 for a gap above 0, 0 for one below, and 0.5 for a tie, float64."""
    return (gaps > 0).double().masked_fill(is_tie(gaps, rounding), 0.5)


def is_tie(gaps: Tensor, rounding: Tensor) -> Tensor:
    """Mask of the gaps that are at most the rounding of both sides together, bool."""
    return gaps.abs() <= rounding


def row_margins(
    rewards: Tensor, rounding: Tensor, rows: Tensor, good: Tensor
) -> tuple[Tensor, Tensor]:
    """Each row's mean reward of good completions less that of bad ones, and its rounding.

    A missing side counts as 0. Both are (completions,), with row i's value at index i.
    """
    values = torch.stack([rewards, rounding])
    right, wrong = (_means_by_row(values, rows, one, of_none=0.0) for one in (good, ~good))
    return right[0] - wrong[0], right[1] + wrong[1]


def _means_by_row(
    values: Tensor, rows: Tensor, which: Tensor, *, of_none: float = math.nan
) -> Tensor:
    """Means by row of values (kinds, completions), over the completions in `which`."""
    none = torch.zeros_like(values)  # one column per completion: at least as many as rows
    totals = none.index_add(1, rows, values.masked_fill(~which, 0.0))
    counts = none[0].index_add(0, rows, which.to(none.dtype))
    return (totals / counts).masked_fill(counts == 0, of_none)
