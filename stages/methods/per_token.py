"""Methods that compare what chosen and rejected branches gained per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...schemas.config import option
from ...schemas.methods import Method, Rewards, beta, label_smoothing, sft_weight
from .margins import smoothed
from .modifiers import WEIGHS_PAIRS
from .pairs import pairs_of, referenced_output
from .rewards import MEAN_RATIOS, scaled_mean_ratios, scaled_ratios

if TYPE_CHECKING:
    from torch import Tensor

    from ...schemas.methods import Branches, LossOutput, Step


@dataclass(frozen=True)
class IpoOptions:
    """Options of ipo."""

    beta: float = beta(0.1)
    normalize: Literal["mean", "sum"] = option(
        "mean", "compare log-ratios per token, as the authors run it, or of whole branches"
    )
    sft_weight: float = sft_weight()


@dataclass(frozen=True)
class DpoNormOptions:
    """Options of dpo_norm."""

    beta: float = beta(5.0)
    label_smoothing: float = label_smoothing(0.0)
    sft_weight: float = sft_weight()


def ipo(branches: Branches, _: Step, options: IpoOptions) -> LossOutput:
    """(r_c / n_c - r_l / n_l - 1 / (2b))^2, IPO (https://arxiv.org/abs/2310.12036)."""
    pairs = pairs_of(branches)
    margins = pairs.mean_margins if options.normalize == "mean" else pairs.margins
    losses = (margins - 1 / (2 * options.beta)).square()
    return referenced_output(pairs, losses, options)


def ipo_rewards(branches: Branches, options: IpoOptions) -> Tensor:
    """beta * r / n, or beta * r where whole branches are compared, (branches,)."""
    of_branches = scaled_mean_ratios if options.normalize == "mean" else scaled_ratios
    return of_branches(branches, options)


def dpo_norm(branches: Branches, _: Step, options: DpoNormOptions) -> LossOutput:
    """-LS(b (r_c / n_c - r_l / n_l)), DPO of Tulu 3 (https://arxiv.org/abs/2411.15124)."""
    pairs = pairs_of(branches)
    losses = smoothed(options.beta * pairs.mean_margins, options.label_smoothing)
    return referenced_output(pairs, losses, options)


IPO = Method(
    name="ipo",
    summary="(r_c/n_c - r_l/n_l - 1/(2b))^2",
    source="IPO, https://arxiv.org/abs/2310.12036",
    use="Few or very clear pairs, where dpo would push the margin without end.",
    loss=ipo,
    options=IpoOptions,
    rewards=Rewards("b r/n, or b r with normalize sum", ipo_rewards),
    rows="paired",
    items="rows",
    needs=frozenset({"reference"}),
    modifiers=WEIGHS_PAIRS,
)
DPO_NORM = Method(
    name="dpo_norm",
    summary="-(1-e) LS(b d) - e LS(-b d), d = r_c/n_c - r_l/n_l",
    source="Tulu 3, https://arxiv.org/abs/2411.15124",
    use="Pairs of very different lengths: dpo with each side divided by its own.",
    loss=dpo_norm,
    options=DpoNormOptions,
    rewards=MEAN_RATIOS,
    rows="paired",
    items="rows",
    needs=frozenset({"reference"}),
    modifiers=WEIGHS_PAIRS,
)
