"""Modifiers: options for several methods that change log-ratios, margins or row weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ...schemas.errors import UsageError
from ...schemas.methods import Completions, Metric, Need
from .method import Options, option, tokens_of
from .tensors import F, Tensor, bounded_exp, bounded_expm1, sums_of, torch

BELONGS_TO = {"f_alpha": "f_divergence", "log_eps_p": "humanline", "log_eps_r": "humanline"}
_NEEDS: dict[str, Need] = {
    "ld_alpha": "token_reference",
    "humanline": "token_reference",
    "wpo": "collision_logps",
}


class Modifiers(Options):
    """The values of all modifiers."""

    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = option(
        "divergence that keeps the policy near the reference", default="reverse_kl"
    )
    f_alpha: float = option("the alpha of f_divergence: alpha", default=0.5)
    ld_alpha: float = option(
        "weight of tokens beyond the shorter side's length; 1: like others", default=1.0, ge=0
    )
    mean_ratios: bool = option(
        "compares log-ratios per token, r / n, as NeMo-Aligner can", default=False
    )
    wpo: bool = option("weighs pairs by their likelihood under the policy", default=False)
    margin: str = option("data column with the target margin of each pair", default="")
    row_weight: str = option("data column with the weight of each row", default="")
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
        """The modifiers that a method must allow."""
        return frozenset(BELONGS_TO.get(name, name) for name in self.active)

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of the modifiers, beside the method's."""
        return frozenset(_NEEDS[name] for name in self.active if name in _NEEDS)

    @property
    def columns(self) -> tuple[str, ...]:
        """The data columns that the modifiers read."""
        return tuple(name for name in (self.margin, self.row_weight) if name)

    def require_in_use(self) -> None:
        """Refuses options of a modifier that is not enabled."""
        for name in self.active:
            if name == "f_alpha" and self.f_divergence != "alpha":
                raise UsageError("method.f_alpha has no effect without method.f_divergence=alpha.")
            if BELONGS_TO.get(name) == "humanline" and not self.humanline:
                raise UsageError(f"method.{name} has no effect without method.humanline=true.")

    def applied(self, completions: Completions, *, less: float = 0.0) -> Completions:
        """The completions with adjusted values for comparisons; `logps` stays for imitation.

        `less` is subtracted from each sum that is compared.
        """
        if self.humanline:
            completions = _clamped(completions, self.log_eps_p, self.log_eps_r)
        if self.ld_alpha != 1.0:
            completions = _with_tails_weighed(completions, self.ld_alpha)
        if less:
            completions = completions.less(less)
        if self.mean_ratios:
            completions = replace(completions, adjusted=completions.ratios / completions.num_tokens)
        if self.f_divergence != "reverse_kl":
            ratios = _diverged(completions.ratios, self.f_divergence, self.f_alpha)
            completions = replace(completions, adjusted=ratios)
        if self.margin:
            completions = replace(completions, margin=completions.columns[self.margin])
        return completions

    def weighed(self, losses: Tensor, completions: Completions) -> Tensor:
        """Losses of rows or of completions, each times its weight."""
        if self.wpo:
            losses = losses * _likelihood_of_pairs(completions)
        if self.row_weight:
            weights = completions.columns[self.row_weight]
            per_row = len(losses) == len(weights)
            losses = losses * (weights if per_row else weights[completions.rows])
        return losses

    def metrics(self, completions: Completions) -> Mapping[str, Metric]:
        """The metrics of the modifiers."""
        if not self.humanline:
            return {}
        tokens = tokens_of(completions)
        ratios = (tokens.logps if tokens.reference is None else tokens.log_ratios).detach()
        inside = (ratios >= self.log_eps_p) & (ratios <= self.log_eps_r)
        return {"humanline/unclamped": inside.double()}


def names_within(allowed: frozenset[str]) -> frozenset[str]:
    """The names of the allowed modifiers and of their own options."""
    names = Modifiers.model_fields
    return frozenset(name for name in names if BELONGS_TO.get(name, name) in allowed)


def _clamped(completions: Completions, low: float, high: float) -> Completions:
    """Humanline (https://arxiv.org/abs/2509.24207): clamps the log-ratio of each token.

    For methods without a reference, a log-prob is the log-ratio to a probability of 1.
    """
    tokens = tokens_of(completions)
    logps = sums_of(tokens.logps.clamp(low, high), tokens.counts)
    completions = replace(completions, adjusted_logps=logps)
    if tokens.reference is None:
        return completions
    ratios = tokens.log_ratios.clamp(low, high)
    return replace(
        completions,
        adjusted=sums_of(ratios, tokens.counts),
        tokens=replace(tokens, adjusted=ratios),
    )


def _with_tails_weighed(completions: Completions, alpha: float) -> Completions:
    """LD-DPO (https://arxiv.org/abs/2409.06411): weighs tokens beyond the shorter side's length.

    A sum of weighted log-ratios is the difference of both models' weighted log-probs.
    """
    tokens = tokens_of(completions)
    counts = tokens.counts
    shorter = counts.view(-1, 2).amin(dim=1).repeat_interleave(2)
    ratios = tokens.log_ratios
    is_short = tokens.positions < tokens.of_each(shorter)
    weighed = torch.where(is_short, ratios, alpha * ratios)
    return replace(completions, adjusted=sums_of(weighed, counts))


def _diverged(ratios: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(u) of u = exp(ratio) for D_f(policy || reference) (https://arxiv.org/abs/2309.16240).

    forward_kl: 1 - 1 / u; js: log(2 u / (1 + u)); alpha: (u^(alpha - 1) - 1) / (alpha - 1), which
    at alpha = 1 is log u, as for reverse_kl. All are 0 if the policy equals the reference.
    """
    if divergence == "forward_kl":
        return -bounded_expm1(-ratios)
    if divergence == "js":
        return math.log(2) + F.logsigmoid(ratios)
    assert divergence == "alpha", divergence
    if alpha == 1.0:
        return ratios
    return bounded_expm1((alpha - 1) * ratios) / (alpha - 1)


def _likelihood_of_pairs(completions: Completions) -> Tensor:
    """WPO (https://arxiv.org/abs/2406.11827): exp(m'_c + m'_l), detached, (rows,).

    m' is the mean of log p(token) - log sum_v p(v)^2. It may be above 0, and the weight above 1: as
    in the paper and in TRL 1.16, the weight is not cut there.
    """
    tokens = tokens_of(completions)
    assert tokens.collision_logps is not None, "a need for it is declared"
    relative = (tokens.logps - tokens.collision_logps).detach()
    means = sums_of(relative, tokens.counts) / tokens.counts
    return bounded_exp(means[0::2] + means[1::2])
