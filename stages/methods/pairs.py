"""The two sides of paired rows, and what every paired method adds to its loss and reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...schemas.methods import LossOutput
from ...schemas.rows import Role

if TYPE_CHECKING:
    from torch import Tensor

    from ...schemas.methods import Branches


class ReferencedOptions(Protocol):
    """What every paired method with a reference lets a person choose."""

    @property
    def beta(self) -> float:
        """Scale of the rewards."""
        ...

    @property
    def sft_weight(self) -> float:
        """How much of the chosen branch's likelihood is added."""
        ...


@dataclass(frozen=True)
class Side:
    """The chosen or the rejected branch of every row."""

    logps: Tensor  # (rows,) float64, as are the others
    num_tokens: Tensor
    ratios: Tensor  # r, log(policy / reference) of the whole completion, as the loss is to see it

    @property
    def mean_ratios(self) -> Tensor:
        """The same per token, r / n."""
        return self.ratios / self.num_tokens

    @property
    def mean_logps(self) -> Tensor:
        """The policy's log-prob per token, m."""
        return self.logps / self.num_tokens


@dataclass(frozen=True)
class Pairs:
    """One chosen and one rejected branch per row."""

    chosen: Side
    rejected: Side
    wanted: Tensor | None = None  # (rows,) what x has to exceed

    @property
    def margins(self) -> Tensor:
        """How much more the chosen branch has gained than the rejected one, D = r_c - r_l."""
        return self.chosen.ratios - self.rejected.ratios

    @property
    def mean_margins(self) -> Tensor:
        """The same per token, r_c / n_c - r_l / n_l."""
        return self.chosen.mean_ratios - self.rejected.mean_ratios

    def scaled_margins(self, beta: float) -> Tensor:
        """x = beta * D, less what the data wants it to be at least."""
        x = beta * self.margins
        return x if self.wanted is None else x - self.wanted


def pairs_of(branches: Branches) -> Pairs:
    """Takes a micro-batch of paired rows apart."""
    assert bool((branches.roles[0::2] == Role.CHOSEN).all()), "chosen comes first"
    assert bool((branches.roles[1::2] == Role.REJECTED).all()), "rejected comes second"
    return Pairs(_side(branches, first=0), _side(branches, first=1), branches.margin)


def referenced_output(pairs: Pairs, losses: Tensor, options: ReferencedOptions) -> LossOutput:
    """Losses + sft_weight * nll_c (https://arxiv.org/abs/2404.19733)."""
    nll = -pairs.chosen.mean_logps
    metrics = logp_metrics(pairs) | {"nll": nll.detach()}
    return LossOutput(losses + options.sft_weight * nll, metrics)


def logp_metrics(pairs: Pairs) -> dict[str, Tensor]:
    """The policy's sums of either side."""
    return {
        "logps/chosen": pairs.chosen.logps.detach(),
        "logps/rejected": pairs.rejected.logps.detach(),
    }


def _side(branches: Branches, *, first: int) -> Side:
    every_other = slice(first, None, 2)
    return Side(
        logps=branches.logps[every_other],
        num_tokens=branches.num_tokens[every_other],
        ratios=branches.ratios[every_other],
    )
