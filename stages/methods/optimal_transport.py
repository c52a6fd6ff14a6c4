"""AOT: compares the chosen and the rejected of a whole step by rank, not pair by pair."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
from .modifiers import SEES_RATIOS
from .rewards import MARGINS, paired_method, pairs_of, referenced_output, scaled_ratios
from .tensors import logsigmoid

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TransportOptions:
    """Options of aot and aot_unpaired."""

    beta: float = beta(0.1)
    label_smoothing: float = label_smoothing(0.0)
    sft_weight: float = sft_weight()
    sft_normalize: Normalize = sft_normalize()


def aot(branches: Branches, step: Step, options: TransportOptions) -> LossOutput:
    """-(1 - e) LS(b d) - e LS(-b d), AOT of pairs (https://arxiv.org/abs/2406.05882).

    d = sorted lp_c - lp_l less sorted ref_c - ref_l, both over the step.
    """
    pairs, e = pairs_of(branches), options.label_smoothing
    ranks = _ranks(_margins(step.pre_pass["policy"]))[_rows_of(branches)]
    reference = _sorted(_margins(step.pre_pass["reference"]))[ranks]
    x = options.beta * (pairs.chosen.logps - pairs.rejected.logps - reference)
    losses = -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)
    return _with_comparison(referenced_output(pairs, losses, options), x)


def aot_unpaired(branches: Branches, step: Step, options: TransportOptions) -> LossOutput:
    """-(1 - e) LS(b d) - e LS(-b d), AOT of two crowds (https://arxiv.org/abs/2406.05882).

    d = sorted r_c less sorted r_l, both over the step. The two branches of one d may stand in
    different micro-batches: each is compared with the other's value of the pre-pass, and adds
    half of the value but the whole of its own gradient.
    """
    pairs, rows, e = pairs_of(branches), _rows_of(branches), options.label_smoothing
    chosen, rejected = step.pre_pass["ratios"][0::2], step.pre_pass["ratios"][1::2]
    gains = pairs.chosen.ratios - _sorted(rejected)[_ranks(chosen)[rows]]
    drops = _sorted(chosen)[_ranks(rejected)[rows]] - pairs.rejected.ratios
    halves = (
        _half_of(-(1 - e) * logsigmoid(x) - e * logsigmoid(-x))
        for x in (options.beta * gains, options.beta * drops)
    )
    output = referenced_output(pairs, sum(halves, start=chosen.new_zeros(())), options)
    return _with_comparison(output, options.beta * gains)


def _with_comparison(output: LossOutput, margins: Tensor) -> LossOutput:
    """Reports the margins that are compared, b d, instead of those between a row's own sides."""
    return replace(output, metrics={**output.metrics, MARGINS: margins.detach()})


def pre_pass_logps(branches: Branches, _: TransportOptions) -> dict[str, Tensor]:
    """The sums of both models, whose differences aot sorts."""
    return {"policy": branches.logps.detach(), "reference": branches.reference}


def pre_pass_ratios(branches: Branches, _: TransportOptions) -> dict[str, Tensor]:
    """The log-ratios that aot_unpaired sorts."""
    return {"ratios": branches.ratios.detach()}


def _margins(values: Tensor) -> Tensor:
    """Chosen less rejected of every row of the step."""
    return values[0::2] - values[1::2]


def _ranks(values: Tensor) -> Tensor:
    """The rank of each; of equal values the first in the step has the lower rank."""
    return values.argsort(stable=True).argsort()


def _sorted(values: Tensor) -> Tensor:
    return values.sort(stable=True).values


def _rows_of(branches: Branches) -> Tensor:
    """The index of each row in the step."""
    assert branches.step_indices is not None, "branches of a pre-pass have indices"
    return branches.step_indices[0::2] // 2


def _half_of(losses: Tensor) -> Tensor:
    """The losses with half of their value and all of their gradient."""
    return losses - losses.detach() / 2


AOT = paired_method(
    name="aot",
    summary="-(1-e) LS(b d) - e LS(-b d), d = sort(lp_c-lp_l) less that of ref",
    source="AOT, https://arxiv.org/abs/2406.05882",
    use="Pairs, when margins should grow over the whole data rather than in each pair.",
    loss=aot,
    options=TransportOptions,
    rewards=Rewards("b r, margins and accuracies of b d", scaled_ratios),
    pre_pass=pre_pass_logps,
    modifiers=frozenset(),
)
AOT_UNPAIRED = replace(
    AOT,
    name="aot_unpaired",
    summary="-(1-e) LS(b d) - e LS(-b d), d = sort(r_c) - sort(r_l)",
    use="Pairs whose two sides need not belong together, as good and bad answers of a step.",
    loss=aot_unpaired,
    pre_pass=pre_pass_ratios,
    modifiers=SEES_RATIOS,
)
