"""Rewards: what a method compares of each branch, and the metrics that are made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...schemas.methods import Rewards
from ...schemas.rows import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ...schemas.methods import Branches, RowKind


def scaled_ratios(branches: Branches, options: Any) -> Tensor:
    """beta * r, (branches,)."""
    return branches.ratios * float(options.beta)


def scaled_mean_ratios(branches: Branches, options: Any) -> Tensor:
    """beta * r / n, (branches,): of methods that divide each branch by its own length."""
    return scaled_ratios(branches, options) / branches.num_tokens


def scores(branches: Branches, _: Any) -> Tensor:
    """What a head that scores says of each branch, (branches,)."""
    return branches.logps


RATIOS = Rewards("b r", scaled_ratios)
MEAN_RATIOS = Rewards("b r/n", scaled_mean_ratios)
SCORES = Rewards("s", scores)


def reward_metrics(rewards: Tensor, branches: Branches, kind: RowKind) -> dict[str, Tensor]:
    """What is reported of the rewards of a micro-batch of rows of this kind.

    Every row, branch or pair of candidates counts the same, whatever `row_weight` it has.
    """
    if kind == "paired":
        return paired_metrics(rewards[0::2], rewards[1::2])
    if kind == "grouped":
        return {"rewards/accuracies": _ranked_alike(rewards, branches)}
    is_desirable = branches.roles == Role.DESIRABLE
    return {
        "rewards/chosen": rewards[is_desirable],
        "rewards/rejected": rewards[~is_desirable],
        "rewards/accuracies": _rows_told_apart(rewards, branches.rows, is_desirable),
    }


def paired_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Of pairs: rewards of either side, and which is the higher; equal ones are not right."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        **compared(chosen - rejected),
    }


def compared(margins: Tensor) -> dict[str, Tensor]:
    """What is reported of differences that should be above 0, (pairs,)."""
    return {"rewards/margins": margins, "rewards/accuracies": (margins > 0).double()}


def with_margin(means: Mapping[str, float]) -> dict[str, float]:
    """Adds rewards/margins to the means of a whole step that holds both labels."""
    either = ("rewards/chosen", "rewards/rejected")
    if "rewards/margins" in means or not all(name in means for name in either):
        return dict(means)
    return {**means, "rewards/margins": means[either[0]] - means[either[1]]}


def _rows_told_apart(rewards: Tensor, rows: Tensor, is_desirable: Tensor) -> Tensor:
    """Of each row with both labels, whether its desirable branches have the higher mean."""
    desirable, undesirable = (
        _means_by_row(rewards, rows, which) for which in (is_desirable, ~is_desirable)
    )
    both = desirable.isfinite() & undesirable.isfinite()
    return (desirable > undesirable)[both].double()


def _means_by_row(rewards: Tensor, rows: Tensor, which: Tensor) -> Tensor:
    """NaN for a row without such a branch."""
    size = int(rows.max()) + 1 if len(rows) else 0
    totals = rewards.new_zeros(size).index_add(0, rows[which], rewards[which])
    return totals / torch.bincount(rows[which], minlength=size)


def _ranked_alike(rewards: Tensor, branches: Branches) -> Tensor:
    """1 or 0 for each ordered pair of a better and a worse candidate of one prompt, float64."""
    rows, given = branches.rows, branches.scores
    is_pair = (rows[:, None] == rows) & (given[:, None] > given)
    return (rewards[:, None] > rewards)[is_pair].double()
