"""RPO: the policy's margin is to be as large as the data's scores say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...schemas.methods import (
    Branches,
    LossOutput,
    Normalize,
    Step,
    beta,
    sft_normalize,
    sft_weight,
)
from ...schemas.option import option
from .modifiers import DIVIDES, SEES_RATIOS, WEIGHS_PAIRS
from .rewards import paired_method, pairs_of, referenced_output
from .tensors import logsigmoid

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RpoOptions:
    """Options of rpo_sq, rpo_bwd_kl and rpo_fwd_kl."""

    beta: float = beta(0.1)
    eta: float = option(1.0, "margin wanted per point between the two scores", gt=0)
    sft_weight: float = sft_weight()
    sft_normalize: Normalize = sft_normalize()


def rpo_sq(branches: Branches, _: Step, options: RpoOptions) -> LossOutput:
    """(b D - eta Ds)^2, Ds = score_c - score_l (https://arxiv.org/abs/2502.00203)."""
    pairs = pairs_of(branches)
    losses = (options.beta * pairs.margins - wanted_margins(branches, options)).square()
    return referenced_output(pairs, losses, options)


def rpo_bwd_kl(branches: Branches, _: Step, options: RpoOptions) -> LossOutput:
    """KL(S(eta Ds) || S(b D)), Ds = score_c - score_l (https://arxiv.org/abs/2502.00203)."""
    pairs = pairs_of(branches)
    losses = divergence(wanted_margins(branches, options), options.beta * pairs.margins)
    return referenced_output(pairs, losses, options)


def rpo_fwd_kl(branches: Branches, _: Step, options: RpoOptions) -> LossOutput:
    """KL(S(b D) || S(eta Ds)), Ds = score_c - score_l (https://arxiv.org/abs/2502.00203)."""
    pairs = pairs_of(branches)
    losses = divergence(options.beta * pairs.margins, wanted_margins(branches, options))
    return referenced_output(pairs, losses, options)


def wanted_margins(branches: Branches, options: RpoOptions) -> Tensor:
    """eta Ds: what the scores say that b D should be, (rows,)."""
    return options.eta * (branches.scores[0::2] - branches.scores[1::2])


def divergence(some: Tensor, others: Tensor) -> Tensor:
    """KL(S(some) || S(others)) of two-way choices, from their log-odds."""
    likely = some.sigmoid() * (logsigmoid(some) - logsigmoid(others))
    unlikely = (-some).sigmoid() * (logsigmoid(-some) - logsigmoid(-others))
    return likely + unlikely


RPO_SQ = paired_method(
    name="rpo_sq",
    summary="(b D - eta Ds)^2, Ds = score_c - score_l",
    source="RPO, https://arxiv.org/abs/2502.00203",
    use="Pairs with scores whose differences can be trusted as they are.",
    loss=rpo_sq,
    options=RpoOptions,
    needs=frozenset({"reference", "scores"}),
    modifiers=SEES_RATIOS | DIVIDES | WEIGHS_PAIRS,
)
RPO_BWD_KL = replace(
    RPO_SQ,
    name="rpo_bwd_kl",
    summary="KL(S(eta Ds) || S(b D)), Ds = score_c - score_l",
    use="Pairs with scores: as dpo, but nearly equal answers are kept nearly equal.",
    loss=rpo_bwd_kl,
)
RPO_FWD_KL = replace(
    RPO_SQ,
    name="rpo_fwd_kl",
    summary="KL(S(b D) || S(eta Ds)), Ds = score_c - score_l",
    use="Pairs with scores: gives up on pairs that the policy holds to be the other way round.",
    loss=rpo_fwd_kl,
)
