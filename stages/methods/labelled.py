"""Branches that are desirable or undesirable by themselves, and the metrics reported of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...schemas.rows import Role

if TYPE_CHECKING:
    from torch import Tensor

    from ...schemas.methods import Branches


@dataclass(frozen=True)
class Labelled:
    """Every branch with its own label."""

    logps: Tensor  # (branches,) float64
    ratios: Tensor  # (branches,) float64, r = log(policy / reference) as the loss is to see it
    is_desirable: Tensor  # (branches,) bool

    @property
    def signs(self) -> Tensor:
        """+1 for desirable and -1 for undesirable branches, (branches,) float64."""
        return self.weights(1.0, -1.0)

    def weights(self, desirable: float, undesirable: float) -> Tensor:
        """What each branch weighs, (branches,) float64."""
        # Tensors, for torch.where() makes float32 of two plain numbers.
        high, low = self.ratios.new_tensor(desirable), self.ratios.new_tensor(undesirable)
        return torch.where(self.is_desirable, high, low)

    def metrics(self) -> dict[str, Tensor]:
        """Log-probs of either label, desirable under the name of chosen."""
        logps = self.logps.detach()
        return {
            "logps/chosen": logps[self.is_desirable],
            "logps/rejected": logps[~self.is_desirable],
        }


def labelled_of(branches: Branches) -> Labelled:
    """Reads the labels of a micro-batch of labelled branches."""
    is_desirable = branches.roles == Role.DESIRABLE
    assert bool((is_desirable | (branches.roles == Role.UNDESIRABLE)).all()), "labels only"
    return Labelled(branches.logps, branches.ratios, is_desirable)
