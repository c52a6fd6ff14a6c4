"""DPO and its relatives (IPO, hinge, EXO, …): margins of chosen over rejected, also per token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ...schemas.methods import (
    Branches,
    LossOutput,
    Normalize,
    Rewards,
    Step,
    beta,
    label_smoothing,
    sft_normalize,
    sft_weight,
)
from ...schemas.option import option
from .modifiers import CLAMPS, SEES_RATIOS, WEIGHS_PAIRS, bounded_exp
from .rewards import (
    MEAN_RATIOS,
    paired_method,
    pairs_of,
    referenced_output,
    scaled_mean_ratios,
    scaled_ratios,
)
from .tensors import logsigmoid, relu

if TYPE_CHECKING:
    from torch import Tensor

MODIFIERS = SEES_RATIOS | WEIGHS_PAIRS | {"margin"}


@dataclass(frozen=True)
class DpoOptions:
    """Options of dpo."""

    beta: float = beta(0.1)
    label_smoothing: float = label_smoothing(0.0)
    sft_weight: float = sft_weight()
    sft_normalize: Normalize = sft_normalize()


@dataclass(frozen=True)
class CdpoOptions:
    """Options of cdpo."""

    beta: float = beta(0.1)
    label_smoothing: float = label_smoothing(0.2)
    sft_weight: float = sft_weight()
    sft_normalize: Normalize = sft_normalize()


@dataclass(frozen=True)
class RobustOptions:
    """Options of robust."""

    beta: float = beta(0.1)
    label_smoothing: float = label_smoothing(0.1)
    sft_weight: float = sft_weight()
    sft_normalize: Normalize = sft_normalize()


@dataclass(frozen=True)
class ExoOptions:
    """Options of exo."""

    beta: float = beta(0.1)
    label_smoothing: float = option(
        0.001, "probability the target leaves to the rejected branch", gt=0, lt=0.5
    )
    sft_weight: float = sft_weight()
    sft_normalize: Normalize = sft_normalize()


@dataclass(frozen=True)
class HingeOptions:
    """Options of hinge."""

    beta: float = beta(0.1)
    sft_weight: float = sft_weight()
    sft_normalize: Normalize = sft_normalize()


@dataclass(frozen=True)
class DiscopopOptions:
    """Options of discopop."""

    beta: float = beta(0.05)
    tau: float = option(0.05, "width of the switch between the two parts", gt=0)
    sft_weight: float = sft_weight()
    sft_normalize: Normalize = sft_normalize()


def dpo(branches: Branches, _: Step, options: DpoOptions | CdpoOptions) -> LossOutput:
    """-(1 - e) LS(x) - e LS(-x), DPO and, for e > 0, cDPO (https://arxiv.org/abs/2305.18290)."""
    pairs, beta, e = pairs_of(branches), options.beta, options.label_smoothing
    d = pairs.chosen.ratios - pairs.rejected.ratios
    x = beta * d if pairs.wanted is None else beta * d - pairs.wanted
    losses = -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)
    return referenced_output(pairs, losses, options)


def robust(branches: Branches, _: Step, options: RobustOptions) -> LossOutput:
    """(-(1 - e) LS(x) + e LS(-x)) / (1 - 2e), rDPO (https://arxiv.org/abs/2403.00409)."""
    pairs = pairs_of(branches)
    x, e = pairs.scaled_margins(options.beta), options.label_smoothing
    losses = (e * logsigmoid(-x) - (1 - e) * logsigmoid(x)) / (1 - 2 * e)
    return referenced_output(pairs, losses, options)


def exo(branches: Branches, _: Step, options: ExoOptions) -> LossOutput:
    """KL(q || 1 - e) of the two-way choice q = S(x), EXO (https://arxiv.org/abs/2402.00856)."""
    pairs = pairs_of(branches)
    x, e = pairs.scaled_margins(options.beta), options.label_smoothing
    chosen = x.sigmoid() * (logsigmoid(x) - math.log1p(-e))
    rejected = (-x).sigmoid() * (logsigmoid(-x) - math.log(e))
    return referenced_output(pairs, chosen + rejected, options)


def hinge(branches: Branches, _: Step, options: HingeOptions) -> LossOutput:
    """max(0, 1 - x), the hinge loss of RSO (https://arxiv.org/abs/2309.06657)."""
    pairs = pairs_of(branches)
    losses = relu(1 - pairs.scaled_margins(options.beta))
    return referenced_output(pairs, losses, options)


def discopop(branches: Branches, _: Step, options: DiscopopOptions) -> LossOutput:
    """(1 - g) (-LS(x)) + g exp(-x), g = S(x / tau) (https://arxiv.org/abs/2406.08414)."""
    pairs = pairs_of(branches)
    x = pairs.scaled_margins(options.beta)
    logistic = -(-x / options.tau).sigmoid() * logsigmoid(x)
    # One exponent: far below 0, g is 0 and exp(-x) infinite.
    exponential = bounded_exp(logsigmoid(x / options.tau) - x)
    return referenced_output(pairs, logistic + exponential, options)


DPO = paired_method(
    name="dpo",
    summary="-(1-e) LS(b D) - e LS(-b D)",
    source="DPO, https://arxiv.org/abs/2305.18290",
    use="Pairs with clear labels: the one to start with. label_smoothing makes it cDPO.",
    loss=dpo,
    options=DpoOptions,
    modifiers=MODIFIERS | CLAMPS,
)
CDPO = replace(
    DPO,
    name="cdpo",
    source="cDPO, https://ericmitchell.ai/cdpo.pdf",
    use="Pairs of which some are labelled the wrong way round: the margin stops growing.",
    options=CdpoOptions,
)
ROBUST = paired_method(
    name="robust",
    summary="(-(1-e) LS(b D) + e LS(-b D)) / (1-2e)",
    source="rDPO, https://arxiv.org/abs/2403.00409",
    use="Pairs whose share of wrong labels is known: it is unbiased where cdpo is cautious.",
    loss=robust,
    options=RobustOptions,
    modifiers=MODIFIERS,
)
EXO = paired_method(
    name="exo",
    summary="q (log q - log(1-e)) + (1-q) (log(1-q) - log e), q = S(b D)",
    source="EXO, https://arxiv.org/abs/2402.00856",
    use="Pairs, when the policy should settle on one good answer instead of covering all.",
    loss=exo,
    options=ExoOptions,
    modifiers=MODIFIERS,
)
HINGE = paired_method(
    name="hinge",
    summary="max(0, 1 - b D)",
    source="RSO, https://arxiv.org/abs/2309.06657",
    use="Pairs, when those with a large enough margin should be left alone.",
    loss=hinge,
    options=HingeOptions,
    modifiers=MODIFIERS,
)
DISCOPOP = paired_method(
    name="discopop",
    summary="(1-g) (-LS(b D)) + g exp(-b D), g = S(b D / tau)",
    source="DiscoPOP, https://arxiv.org/abs/2406.08414",
    use="Pairs, to compare with a loss found by search; near D = 0 it pushes the wrong way.",
    loss=discopop,
    options=DiscopopOptions,
    modifiers=MODIFIERS,
)


@dataclass(frozen=True)
class IpoOptions:
    """Options of ipo."""

    beta: float = beta(0.1)
    normalize: Literal["mean", "sum"] = option(
        "mean", "compare log-ratios per token, as the authors run it, or of whole branches"
    )
    sft_weight: float = sft_weight()
    sft_normalize: Normalize = sft_normalize()


@dataclass(frozen=True)
class DpoNormOptions:
    """Options of dpo_norm."""

    beta: float = beta(5.0)
    label_smoothing: float = label_smoothing(0.0)
    sft_weight: float = sft_weight()
    sft_normalize: Normalize = sft_normalize()


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
    """DPO of Tulu 3, x = b (r_c / n_c - r_l / n_l) (https://arxiv.org/abs/2411.15124)."""
    pairs, e = pairs_of(branches), options.label_smoothing
    x = options.beta * pairs.mean_margins
    losses = -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)
    return referenced_output(pairs, losses, options)


IPO = paired_method(
    name="ipo",
    summary="(r_c/n_c - r_l/n_l - 1/(2b))^2",
    source="IPO, https://arxiv.org/abs/2310.12036",
    use="Few or very clear pairs, where dpo would push the margin without end.",
    loss=ipo,
    options=IpoOptions,
    rewards=Rewards("b r/n, or b r with normalize sum", ipo_rewards),
    modifiers=WEIGHS_PAIRS | CLAMPS,
)
DPO_NORM = paired_method(
    name="dpo_norm",
    summary="-(1-e) LS(b d) - e LS(-b d), d = r_c/n_c - r_l/n_l",
    source="Tulu 3, https://arxiv.org/abs/2411.15124",
    use="Pairs of very different lengths: dpo with each side divided by its own.",
    loss=dpo_norm,
    options=DpoNormOptions,
    rewards=MEAN_RATIOS,
    modifiers=WEIGHS_PAIRS,
)
