"""GRPO, and the clipped objective of single tokens that PPO shares with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from ...schemas.config import option
from ...schemas.methods import LossOutput, Method, Rewards, number
from .modifiers import CLAMPS, sums_of, tokens_of
from .stable import bounded_exp

if TYPE_CHECKING:
    from torch import Tensor

    from ...schemas.methods import Branches, Step, Tokens

MODIFIERS = CLAMPS | {"row_weight"}
# Keeps the advantages of a group finite where all of its scores are the same.
SMALLEST_SPREAD = 1e-4


@dataclass(frozen=True)
class GrpoOptions:
    """Options of grpo."""

    beta: float = number(0.01, "weight of the distance from the reference", least=0)
    epsilon: float = number(
        0.2, "a token gains nothing beyond a ratio of 1 ± this", above=0, below=1
    )
    normalize: Literal["tokens", "sequence"] = option(
        "tokens", "tokens: every token counts the same; sequence: every candidate"
    )


def grpo(branches: Branches, step: Step, options: GrpoOptions) -> LossOutput:
    """-min(A p, A clip(p, 1 ± e)) + b (1 / p - 1 + log p) (https://arxiv.org/abs/2402.03300).

    p is policy / reference of a token: the scores are those of fixed candidates, so the reference
    stands for the policy that wrote them. A modifier changes the p of the first term alone.
    """
    tokens = tokens_of(branches)
    advantages = group_advantages(branches).repeat_interleave(tokens.counts)
    losses = clipped(advantages, tokens.log_ratios, options.epsilon)
    losses = sums_of(losses + options.beta * distances(tokens), tokens.counts)
    if options.normalize == "sequence":
        # The step divides by its tokens: this leaves a mean over branches of each one's own mean.
        losses = losses / branches.num_tokens * (step.tokens / max(1, step.branches))
    return LossOutput(losses, candidate_metrics(branches, advantages, options.epsilon))


def grpo_rewards(branches: Branches, options: GrpoOptions) -> Tensor:
    """r, or r / n where every candidate counts the same, (branches,)."""
    of_sequences = options.normalize == "sequence"
    return branches.ratios / branches.num_tokens if of_sequences else branches.ratios


def group_advantages(branches: Branches) -> Tensor:
    """(s - mean) / (std + 1e-4) over the candidates of a prompt, (branches,); 0 for a single one.

    std is the sample's, over n - 1, as in TRL; HALOs takes the population's and adds
    1e-2.
    """
    scores, rows = branches.scores, branches.rows
    sizes = torch.bincount(rows)
    deviations = scores - (sums_of(scores, sizes) / sizes)[rows]
    spread = (sums_of(deviations.square(), sizes) / (sizes - 1).clamp(min=1)).sqrt()
    return deviations / (spread[rows] + SMALLEST_SPREAD)


def clipped(advantages: Tensor, log_ratios: Tensor, epsilon: float) -> Tensor:
    """-min(A p, A clip(p, 1 ± e)) of each token, p = exp(log_ratio), (tokens,)."""
    ratios = bounded_exp(log_ratios)
    return -torch.minimum(advantages * ratios, advantages * ratios.clamp(1 - epsilon, 1 + epsilon))


def distances(tokens: Tokens) -> Tensor:
    """1 / p - 1 + log p of each token, at least 0, whatever a modifier made of p, (tokens,)."""
    ratios = plain_log_ratios(tokens)
    return bounded_exp(-ratios) - 1 + ratios


def plain_log_ratios(tokens: Tokens) -> Tensor:
    """log(policy / reference) of each token before any modifier, (tokens,)."""
    assert tokens.reference is not None, "a need for the per-token reference is declared"
    return tokens.logps - tokens.reference


def candidate_metrics(branches: Branches, advantages: Tensor, epsilon: float) -> dict[str, Tensor]:
    """What methods of scored candidates report.

    `rewards/scores` are the data's, `advantages/gained` is A (p - 1), by how much a token has moved
    where its score wants it, and `clip/share` where it gains nothing any more.
    """
    tokens = tokens_of(branches)
    ratios = bounded_exp(tokens.log_ratios.detach())
    limited = ratios.clamp(1 - epsilon, 1 + epsilon)
    return {
        "rewards/scores": branches.scores,
        "advantages/gained": advantages * (ratios - 1),
        "kl/tokens": distances(tokens).detach(),
        "clip/share": (advantages * limited < advantages * ratios).double(),
        "logps/candidates": branches.logps.detach(),
    }


GRPO = Method(
    name="grpo",
    summary="-min(A p, A clip(p)) + b (1/p - 1 + log p), A = (s - mean) / std",
    source="GRPO, https://arxiv.org/abs/2402.03300",
    use="Several scored answers to each prompt: the better than average gain, the others lose.",
    loss=grpo,
    options=GrpoOptions,
    rewards=Rewards("r, or r/n with normalize sequence", grpo_rewards),
    rows="grouped",
    items="tokens",
    needs=frozenset({"reference", "token_reference", "scores"}),
    modifiers=MODIFIERS,
)
