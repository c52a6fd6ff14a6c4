"""Paired methods that compare each side with the reference alone: APO, SPPO, NCA, BCO on pairs."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.methods import (
    Branches,
    LossOutput,
    Normalize,
    Step,
    beta,
    sft_normalize,
    sft_weight,
)
from .rewards import paired_method, pairs_of, referenced_output
from .tensors import logsigmoid


@dataclass(frozen=True)
class AnchoredOptions:
    """Options of nca, bco_pair, sppo, apo_zero and apo_down."""

    beta: float = beta(0.1)
    sft_weight: float = sft_weight()
    sft_normalize: Normalize = sft_normalize()


def nca(branches: Branches, _: Step, options: AnchoredOptions) -> LossOutput:
    """-LS(b r_c) - LS(-b r_c) / 2 - LS(-b r_l) / 2, NCA (https://arxiv.org/abs/2402.05369)."""
    pairs = pairs_of(branches)
    chosen, rejected = options.beta * pairs.chosen.ratios, options.beta * pairs.rejected.ratios
    losses = -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2
    return referenced_output(pairs, losses, options)


def bco_pair(branches: Branches, _: Step, options: AnchoredOptions) -> LossOutput:
    """-LS(b r_c) - LS(-b r_l), BCO without its shift (https://arxiv.org/abs/2404.04656)."""
    pairs = pairs_of(branches)
    chosen, rejected = options.beta * pairs.chosen.ratios, options.beta * pairs.rejected.ratios
    losses = -logsigmoid(chosen) - logsigmoid(-rejected)
    return referenced_output(pairs, losses, options)


def sppo(branches: Branches, _: Step, options: AnchoredOptions) -> LossOutput:
    """(r_c - 1/(2b))^2 + (r_l + 1/(2b))^2, hard SPPO (https://arxiv.org/abs/2405.00675)."""
    pairs = pairs_of(branches)
    target = 1 / (2 * options.beta)
    losses = (pairs.chosen.ratios - target).square() + (pairs.rejected.ratios + target).square()
    return referenced_output(pairs, losses, options)


def apo_zero(branches: Branches, _: Step, options: AnchoredOptions) -> LossOutput:
    """1 - S(b r_c) + S(b r_l), APO-zero (https://arxiv.org/abs/2408.06266)."""
    pairs = pairs_of(branches)
    chosen, rejected = options.beta * pairs.chosen.ratios, options.beta * pairs.rejected.ratios
    losses = (-chosen).sigmoid() + rejected.sigmoid()
    return referenced_output(pairs, losses, options)


def apo_down(branches: Branches, _: Step, options: AnchoredOptions) -> LossOutput:
    """S(b r_c) + 1 - S(b D), APO-down (https://arxiv.org/abs/2408.06266)."""
    pairs = pairs_of(branches)
    losses = (options.beta * pairs.chosen.ratios).sigmoid()
    losses = losses + (-options.beta * pairs.margins).sigmoid()
    return referenced_output(pairs, losses, options)


NCA = paired_method(
    name="nca",
    summary="-LS(b r_c) - LS(-b r_c)/2 - LS(-b r_l)/2",
    source="NCA, https://arxiv.org/abs/2402.05369",
    use="Pairs, when the likelihood of chosen branches must not fall as it does with dpo.",
    loss=nca,
    options=AnchoredOptions,
)
BCO_PAIR = paired_method(
    name="bco_pair",
    summary="-LS(b r_c) - LS(-b r_l)",
    source="BCO, https://arxiv.org/abs/2404.04656",
    use="Pairs, when chosen must rise and rejected fall, each by itself.",
    loss=bco_pair,
    options=AnchoredOptions,
)
SPPO = paired_method(
    name="sppo",
    summary="(r_c - 1/(2b))^2 + (r_l + 1/(2b))^2",
    source="SPPO, https://arxiv.org/abs/2405.00675",
    use="Pairs of the policy's own answers, round after round.",
    loss=sppo,
    options=AnchoredOptions,
)
APO_ZERO = paired_method(
    name="apo_zero",
    summary="1 - S(b r_c) + S(b r_l)",
    source="APO, https://arxiv.org/abs/2408.06266",
    use="Pairs whose chosen branches are better than what the model writes now.",
    loss=apo_zero,
    options=AnchoredOptions,
)
APO_DOWN = paired_method(
    name="apo_down",
    summary="S(b r_c) + 1 - S(b D)",
    source="APO, https://arxiv.org/abs/2408.06266",
    use="Pairs whose chosen branches are worse than what the model writes now.",
    loss=apo_down,
    options=AnchoredOptions,
)
