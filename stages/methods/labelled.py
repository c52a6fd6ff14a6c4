"""Branches that are desirable or undesirable by themselves, and the metrics reported of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...schemas.rows import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ...schemas.methods import Branches


@dataclass(frozen=True)
class Labelled:
    """Every branch with its own label."""

    logps: Tensor  # (branches,) float64
    reference: Tensor  # (branches,) float64
    ratios: Tensor  # (branches,) float64, r = log(policy / reference) as the loss is to see it
    is_desirable: Tensor  # (branches,) bool
    rows: Tensor  # (branches,) int64

    @property
    def signs(self) -> Tensor:
        """+1 for desirable and -1 for undesirable branches, (branches,) float64."""
        return self.weights(1.0, -1.0)

    def weights(self, desirable: float, undesirable: float) -> Tensor:
        """What each branch weighs, (branches,) float64."""
        # Tensors, for torch.where() makes float32 of two plain numbers.
        high, low = self.ratios.new_tensor(desirable), self.ratios.new_tensor(undesirable)
        return torch.where(self.is_desirable, high, low)

    def metrics(self, beta: float) -> dict[str, Tensor]:
        """Rewards beta * r and log-probs of either label, desirable under the name of chosen.

        Rewards are those of the plain log-ratios, whatever a modifier makes the loss see.
        """
        logps = self.logps.detach()
        rewards = beta * (logps - self.reference)
        return {
            "rewards/chosen": rewards[self.is_desirable],
            "rewards/rejected": rewards[~self.is_desirable],
            "rewards/accuracies": self._accuracies(rewards),
            "logps/chosen": logps[self.is_desirable],
            "logps/rejected": logps[~self.is_desirable],
        }

    def _accuracies(self, rewards: Tensor) -> Tensor:
        """Of each row with both labels, whether its desirable branches have the higher mean."""
        desirable, undesirable = (
            self._means_by_row(rewards, which) for which in (self.is_desirable, ~self.is_desirable)
        )
        both = desirable.isfinite() & undesirable.isfinite()
        return (desirable > undesirable)[both].double()

    def _means_by_row(self, rewards: Tensor, which: Tensor) -> Tensor:
        """NaN for a row without such a branch."""
        size = int(self.rows.max()) + 1 if len(self.rows) else 0
        totals = rewards.new_zeros(size).index_add(0, self.rows[which], rewards[which])
        return totals / torch.bincount(self.rows[which], minlength=size)


def labelled_of(branches: Branches) -> Labelled:
    """Reads the labels of a micro-batch of labelled branches."""
    is_desirable = branches.roles == Role.DESIRABLE
    assert bool((is_desirable | (branches.roles == Role.UNDESIRABLE)).all()), "labels only"
    return Labelled(
        branches.logps, branches.reference, branches.ratios, is_desirable, branches.rows
    )


def with_margin(means: Mapping[str, float]) -> dict[str, float]:
    """Adds rewards/margins to the means of a whole step that holds both labels."""
    either = ("rewards/chosen", "rewards/rejected")
    if "rewards/margins" in means or not all(name in means for name in either):
        return dict(means)
    return {**means, "rewards/margins": means[either[0]] - means[either[1]]}
