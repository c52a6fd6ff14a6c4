"""Modifiers: options for several methods that change log-ratios, margins or row weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ...schemas.errors import UsageError
from ...schemas.methods import Branches, Metric, Need
from .method import Options, option, tokens_of
from .tensors import F, Tensor, bounded_exp, bounded_expm1, sums_of, torch

BELONGS_TO = {"f_alpha": "f_divergence", "log_eps_p": "humanline", "log_eps_r": "humanline"}
_NEEDS: dict[str, Need] = {
    "ld_alpha": "token_reference",
    "humanline": "token_reference",
    "wpo": "purity",
}


class Modifiers(Options):
    """The values of all modifiers."""

    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = option(
        "divergence that holds the policy near the reference", default="reverse_kl"
    )
    f_alpha: float = option("the alpha of f_divergence: alpha", default=0.5)
    ld_alpha: float = option(
        "weight of tokens beyond the shorter side's length; 1: as all others", default=1.0, ge=0
    )
    mean_ratios: bool = option(
        "compares log-ratios per token, r / n, as NeMo-Aligner can", default=False
    )
    wpo: bool = option("weighs pairs by how likely the policy is to write them", default=False)
    margin: str = option("column of the data: how far apart each pair should be", default="")
    row_weight: str = option("column of the data: how much each row counts", default="")
    humanline: bool = option(
        "clamps each token's log-ratio to [log_eps_p, log_eps_r]", default=False
    )
    log_eps_p: float = option("lower end of humanline", default=-1.0, lt=0)
    log_eps_r: float = option("upper end of humanline", default=1.5, gt=0)

    @property
    def active(self) -> dict[str, Any]:
        """The modifiers whose value is not the default."""
        fields = type(self).model_fields
        return {name: value for name, value in self if value != fields[name].default}

    @property
    def required(self) -> frozenset[str]:
        """The modifiers that a method has to allow."""
        return frozenset(BELONGS_TO.get(name, name) for name in self.active)

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of the modifiers, in addition to the method's."""
        return frozenset(_NEEDS[name] for name in self.active if name in _NEEDS)

    @property
    def columns(self) -> tuple[str, ...]:
        """The data's columns that are read."""
        return tuple(name for name in (self.margin, self.row_weight) if name)

    def require_in_use(self) -> None:
        """Refuses options of a modifier that is not turned on."""
        for name in self.active:
            if name == "f_alpha" and self.f_divergence != "alpha":
                raise UsageError("method.f_alpha has no effect without method.f_divergence=alpha.")
            if BELONGS_TO.get(name) == "humanline" and not self.humanline:
                raise UsageError(f"method.{name} has no effect without method.humanline=true.")

    def applied(self, branches: Branches, *, less: float = 0.0) -> Branches:
        """The completions with adjusted values to compare; the log-probs to imitate are unchanged.

        `less` is subtracted from each sum that is compared.
        """
        if self.humanline:
            branches = _clamped(branches, self.log_eps_p, self.log_eps_r)
        if self.ld_alpha != 1.0:
            branches = _with_tails_weighed(branches, self.ld_alpha)
        if less:
            branches = branches.less(less)
        if self.mean_ratios:
            branches = replace(branches, adjusted=branches.ratios / branches.num_tokens)
        if self.f_divergence != "reverse_kl":
            ratios = _diverged(branches.ratios, self.f_divergence, self.f_alpha)
            branches = replace(branches, adjusted=ratios)
        if self.margin:
            branches = replace(branches, margin=branches.columns[self.margin])
        return branches

    def weighed(self, losses: Tensor, branches: Branches) -> Tensor:
        """Losses of rows or of completions, each times its weight."""
        if self.wpo:
            losses = losses * _likelihood_of_pairs(branches)
        if self.row_weight:
            weights = branches.columns[self.row_weight]
            per_row = len(losses) == len(weights)
            losses = losses * (weights if per_row else weights[branches.rows])
        return losses

    def metrics(self, branches: Branches) -> Mapping[str, Metric]:
        """The metrics of the modifiers."""
        if not self.humanline:
            return {}
        tokens = tokens_of(branches)
        ratios = (tokens.logps if tokens.reference is None else tokens.log_ratios).detach()
        inside = (ratios >= self.log_eps_p) & (ratios <= self.log_eps_r)
        return {"humanline/unclamped": inside.double()}


def names_within(allowed: frozenset[str]) -> frozenset[str]:
    """The modifiers a method can be given, and the numbers that belong to them."""
    names = Modifiers.model_fields
    return frozenset(name for name in names if BELONGS_TO.get(name, name) in allowed)


def _clamped(branches: Branches, low: float, high: float) -> Branches:
    """Humanline (https://arxiv.org/abs/2509.24207): no token moves its sum further than this.

    Methods without a reference compare log-probs, which are ratios to a probability of 1.
    """
    tokens = tokens_of(branches)
    logps = sums_of(tokens.logps.clamp(low, high), tokens.counts)
    branches = replace(branches, adjusted_logps=logps)
    if tokens.reference is None:
        return branches
    ratios = tokens.log_ratios.clamp(low, high)
    return replace(
        branches,
        adjusted=sums_of(ratios, tokens.counts),
        tokens=replace(tokens, adjusted=ratios),
    )


def _with_tails_weighed(branches: Branches, alpha: float) -> Branches:
    """LD-DPO (https://arxiv.org/abs/2409.06411): both models' tokens past the shorter side.

    A sum of weighed log-ratios is the difference of both models' weighed log-probs.
    """
    tokens = tokens_of(branches)
    counts = tokens.counts
    shorter = counts.view(-1, 2).amin(dim=1).repeat_interleave(2)
    ratios = tokens.log_ratios
    is_short = tokens.positions < tokens.of_each(shorter)
    weighed = torch.where(is_short, ratios, alpha * ratios)
    return replace(branches, adjusted=sums_of(weighed, counts))


def _diverged(ratios: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(u) of u = exp(ratio) for D_f(policy || reference) (https://arxiv.org/abs/2309.16240).

    forward_kl: 1 - 1 / u; js: log(2 u / (1 + u)); alpha: (u^(alpha - 1) - 1) / (alpha - 1), which
    is log u, that of reverse_kl, at alpha = 1. All are 0 where the policy has not moved.
    """
    if divergence == "forward_kl":
        return -bounded_expm1(-ratios)
    if divergence == "js":
        return math.log(2) + F.logsigmoid(ratios)
    assert divergence == "alpha", divergence
    if alpha == 1.0:
        return ratios
    return bounded_expm1((alpha - 1) * ratios) / (alpha - 1)


def _likelihood_of_pairs(branches: Branches) -> Tensor:
    """WPO (https://arxiv.org/abs/2406.11827): exp(m'_c + m'_l), detached, (rows,).

    m' is the mean of log p(token) - log sum_v p(v)^2, which may be above 0: so may the weight
    above 1. TRL once cut it there; its 1.16 no longer does, nor does the paper's formula.
    """
    tokens = tokens_of(branches)
    assert tokens.purity is not None, "a need for it is declared"
    relative = (tokens.logps - tokens.purity).detach()
    means = sums_of(relative, tokens.counts) / tokens.counts
    return bounded_exp(means[0::2] + means[1::2])
