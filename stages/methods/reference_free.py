"""Methods without a reference, on the policy's own log-probs: ORPO, SimPO, CPO, SLiC."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from ...schemas.methods import Branches, LossOutput, Rewards, Step, label_smoothing
from ...schemas.option import option
from .modifiers import CLAMPS, WEIGHS_PAIRS
from .rewards import Pairs, Side, higher, logp_metrics, paired_method, pairs_of
from .tensors import logsigmoid, relu, torch

if TYPE_CHECKING:
    from torch import Tensor

# Certain to the last bit of float32: a mean log-prob closer to 0 has odds that are only noise.
NEARLY_CERTAIN = -1e-10
NllScope = Literal["pair", "global_tokens"]
SCOPE_HELP = (
    "pair: every chosen branch counts the same; global_tokens: every chosen token of the step"
)


@dataclass(frozen=True)
class OrpoOptions:
    """Options of orpo."""

    lam: float = option(0.1, "weight of the odds ratio beside the likelihood", gt=0)
    nll_scope: NllScope = option("pair", SCOPE_HELP)


@dataclass(frozen=True)
class SimpoOptions:
    """Options of simpo."""

    beta: float = option(10.0, "scale of the difference between the two means", gt=0)
    gamma_ratio: float = option(0.3, "margin wanted between the two means", ge=0)
    label_smoothing: float = label_smoothing(0.0)


@dataclass(frozen=True)
class CpoOptions:
    """Options of cpo."""

    beta: float = option(0.1, "scale of the difference between the two sums", gt=0)
    label_smoothing: float = label_smoothing(0.0)
    alpha: float = option(1.0, "weight of the chosen branch's likelihood", ge=0)
    nll_scope: NllScope = option("pair", SCOPE_HELP)


@dataclass(frozen=True)
class SlicOptions:
    """Options of slic."""

    delta: float = option(1.0, "margin wanted between the two sums, in nats", gt=0)
    lam: float = option(0.1, "weight of the chosen branch's likelihood", ge=0)
    normalize: Literal["sum", "mean"] = option(
        "sum", "likelihood of the whole chosen branch, or its mean per token"
    )


def orpo(branches: Branches, step: Step, options: OrpoOptions) -> LossOutput:
    """nll_c - lam LS(lo_c - lo_l), lo = m - log(1 - e^m) (https://arxiv.org/abs/2403.07691)."""
    pairs = pairs_of(branches)
    ratio = log_odds(pairs.chosen.mean_logps) - log_odds(pairs.rejected.mean_logps)
    nll = chosen_nll(pairs.chosen, step, options.nll_scope)
    metrics = logp_metrics(pairs) | {
        "nll": nll.detach(),
        "log_odds/ratio": ratio.detach(),
        "log_odds/accuracy": _likelier(pairs, branches.rounding),
    }
    return LossOutput(nll - options.lam * logsigmoid(ratio), metrics)


def _likelier(pairs: Pairs, rounding: float) -> Tensor:
    """1 for pairs whose chosen branch has the higher odds, which rise with the mean log-prob."""
    chosen, rejected = pairs.chosen, pairs.rejected
    gaps = (chosen.mean_logps - rejected.mean_logps).detach()
    return higher(gaps, rounding / chosen.num_tokens + rounding / rejected.num_tokens)


def simpo(branches: Branches, _: Step, options: SimpoOptions) -> LossOutput:
    """-LS(b (m_c - m_l) - b gamma_ratio) at e = 0, SimPO (https://arxiv.org/abs/2405.14734)."""
    pairs, e = pairs_of(branches), options.label_smoothing
    difference = pairs.chosen.mean_compared_logps - pairs.rejected.mean_compared_logps
    x = options.beta * (difference - options.gamma_ratio)
    losses = -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)
    return LossOutput(losses, logp_metrics(pairs))


def cpo(branches: Branches, step: Step, options: CpoOptions) -> LossOutput:
    """-LS(b (lp_c - lp_l)) + alpha nll_c at e = 0, CPO (https://arxiv.org/abs/2401.08417)."""
    pairs, e = pairs_of(branches), options.label_smoothing
    nll = chosen_nll(pairs.chosen, step, options.nll_scope)
    x = options.beta * (pairs.chosen.logps - pairs.rejected.logps)
    preference = -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)
    metrics = logp_metrics(pairs) | {"nll": nll.detach()}
    return LossOutput(preference + options.alpha * nll, metrics)


def slic(branches: Branches, _: Step, options: SlicOptions) -> LossOutput:
    """max(0, delta - lp_c + lp_l) - lam lp_c, SLiC-HF (https://arxiv.org/abs/2305.10425)."""
    pairs = pairs_of(branches)
    chosen = pairs.chosen
    nll = -(chosen.logps if options.normalize == "sum" else chosen.mean_logps)
    compared = options.delta - chosen.compared_logps + pairs.rejected.compared_logps
    losses = relu(compared) + options.lam * nll
    return LossOutput(losses, logp_metrics(pairs) | {"nll": nll.detach()})


def log_odds(mean_logps: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(mean_logps), finite even where p rounds to 1."""
    below_one = mean_logps.clamp(max=NEARLY_CERTAIN)
    return below_one - log1mexp(below_one)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact at both ends (https://doi.org/10.18637/jss.v038.c01)."""
    # Each form sees only its own half: a NaN gradient of the other one would spread from where().
    far = torch.log1p(-torch.exp(x.clamp(max=-math.log(2))))
    near = torch.log(-torch.expm1(x.clamp(min=-math.log(2))))
    return torch.where(x < -math.log(2), far, near)


def chosen_nll(chosen: Side, step: Step, scope: NllScope) -> Tensor:
    """Each pair's part of the step's mean negative log-likelihood of chosen tokens."""
    if scope == "pair":
        return -chosen.mean_logps
    # The recipe divides by the step's rows: this leaves one sum over all chosen tokens.
    return -chosen.logps * (step.rows / max(1, step.chosen_tokens))


_method = partial(paired_method, needs=frozenset(), modifiers=WEIGHS_PAIRS)
ORPO = _method(
    name="orpo",
    summary="-m_c - lam LS(lo_c - lo_l), lo = m - log(1 - exp m)",
    source="ORPO, https://arxiv.org/abs/2403.07691",
    use="Pairs and a base model: it learns to answer and to prefer in one go.",
    loss=orpo,
    options=OrpoOptions,
    rewards=Rewards("lam m", lambda of, options: options.lam * of.logps / of.num_tokens),
)
SIMPO = _method(
    name="simpo",
    summary="-LS(b (m_c - m_l) - b gamma_ratio)",
    source="SimPO, https://arxiv.org/abs/2405.14734",
    use="Pairs, when answers must not grow longer; its learning rate needs care.",
    loss=simpo,
    options=SimpoOptions,
    rewards=Rewards("b m", lambda of, options: options.beta * of.compared_logps / of.num_tokens),
    modifiers=WEIGHS_PAIRS | CLAMPS,
)
CPO = _method(
    name="cpo",
    summary="-LS(b (lp_c - lp_l)) - alpha m_c",
    source="CPO, https://arxiv.org/abs/2401.08417",
    use="Pairs whose chosen branch is worth imitating, as in translation.",
    loss=cpo,
    options=CpoOptions,
    rewards=Rewards("b lp", lambda of, options: options.beta * of.logps),
)
SLIC = _method(
    name="slic",
    summary="max(0, delta - lp_c + lp_l) - lam lp_c",
    source="SLiC-HF, https://arxiv.org/abs/2305.10425",
    use="Pairs, when those with a large enough margin should only be imitated.",
    loss=slic,
    options=SlicOptions,
    rewards=Rewards("lp", lambda of, _: of.compared_logps),
    modifiers=WEIGHS_PAIRS | CLAMPS,
)
