"""GRPO, and PPO on scored completions that were written before training began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...schemas.methods import Branches, LossOutput, Method, Metric, Rewards, Step, Tokens
from ...schemas.option import option
from .modifiers import CLAMPS, bounded_exp, sums_of, tokens_of
from .tensors import pad, torch

if TYPE_CHECKING:
    from torch import Tensor

MODIFIERS = CLAMPS | {"row_weight"}


@dataclass(frozen=True)
class GrpoOptions:
    """Options of grpo."""

    beta: float = option(0.01, "weight of the distance from the reference", ge=0)
    epsilon: float = option(0.2, "a token gains nothing beyond a ratio of 1 ± this", gt=0, lt=1)
    normalize: Literal["tokens", "sequence"] = option(
        "tokens", "tokens: every token counts the same; sequence: every candidate"
    )
    std: Literal["sample", "population", "none"] = option(
        "sample",
        "divides by n - 1, by n, or scores are not divided by a standard deviation",
    )
    std_epsilon: float = option(1e-4, "added to the standard deviation", gt=0)


def grpo(branches: Branches, step: Step, options: GrpoOptions) -> LossOutput:
    """-min(A p, A clip(p, 1 ± e)) + b (1 / p - 1 + log p) (https://arxiv.org/abs/2402.03300).

    p is policy / reference of a token: the scores are those of fixed candidates, so the reference
    stands for the policy that wrote them. A modifier changes the p of the first term alone.
    """
    tokens = tokens_of(branches)
    advantages = tokens.of_each(group_advantages(branches, options))
    losses = clipped(advantages, tokens.log_ratios, options.epsilon)
    losses = sums_of(losses + options.beta * distances(tokens), tokens.counts)
    if options.normalize == "sequence":
        # The recipe divides by the step's tokens: this leaves a mean over each branch's own mean.
        losses = losses / branches.num_tokens * (step.tokens / max(1, step.branches))
    return LossOutput(losses, candidate_metrics(branches, advantages, options.epsilon))


def grpo_rewards(branches: Branches, options: GrpoOptions) -> Tensor:
    """r, or r / n where every candidate counts the same, (branches,)."""
    of_sequences = options.normalize == "sequence"
    return branches.ratios / branches.num_tokens if of_sequences else branches.ratios


def group_advantages(branches: Branches, options: GrpoOptions) -> Tensor:
    """(s - mean) / (std + e) over the candidates of a prompt, (branches,); 0 for a single one.

    std is the sample's, over n - 1, and e 1e-4, as in TRL; HALOs takes the population's and 1e-2.
    Without std prompts whose scores differ more weigh more (https://arxiv.org/abs/2503.20783).
    """
    scores, rows = branches.scores, branches.rows
    # As many as there are branches: those after the last row stay empty.
    sizes = torch.zeros_like(rows).index_add(0, rows, torch.ones_like(rows))
    deviations = scores - (sums_of(scores, sizes) / sizes)[rows]
    if options.std == "none":
        return deviations
    over = sizes - 1 if options.std == "sample" else sizes
    spread = (sums_of(deviations.square(), sizes) / over.clamp(min=1)).sqrt()
    return deviations / (spread[rows] + options.std_epsilon)


def clipped(advantages: Tensor, log_ratios: Tensor, epsilon: float) -> Tensor:
    """-min(A p, A clip(p, 1 ± e)) of each token, p = exp(log_ratio), (tokens,)."""
    ratios = bounded_exp(log_ratios)
    return -torch.minimum(advantages * ratios, advantages * ratios.clamp(1 - epsilon, 1 + epsilon))


def distances(tokens: Tokens) -> Tensor:
    """1 / p - 1 + log p of each token, at least 0, of p before any modifier, (tokens,)."""
    ratios = plain_log_ratios(tokens)
    return bounded_exp(-ratios) - 1 + ratios


def plain_log_ratios(tokens: Tokens) -> Tensor:
    """log(policy / reference) of each token before any modifier, (tokens,)."""
    assert tokens.reference is not None, "a need for the per-token reference is declared"
    return tokens.logps - tokens.reference


def candidate_metrics(branches: Branches, advantages: Tensor, epsilon: float) -> dict[str, Metric]:
    """The metrics of methods of scored candidates.

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
    drawn_by_reference=True,
    modifiers=MODIFIERS,
)


# Keeps whitened advantages finite where all of a step's are the same.
SMALLEST_VARIANCE = 1e-8


@dataclass(frozen=True)
class PpoOptions:
    """Options of ppo."""

    epsilon: float = option(0.5, "a token gains nothing beyond a ratio of 1 ± this", gt=0, lt=1)
    lam: float = option(0.95, "how far an advantage trusts rewards over values", ge=0, le=1)
    gamma: float = option(0.99, "what a reward is worth one token earlier", ge=0, le=1)
    vf: float = option(0.01, "weight of the value head's error", ge=0)
    kl: float = option(0.1, "weight of log p, which keeps a token near the reference", ge=0)
    value_clip: float = option(
        0.0, "a value learns from returns no further away than this; 0: from all", ge=0
    )
    value_target: Literal["gae", "return"] = option(
        "gae",
        "gae: A + V, which trusts later values by lam; return: the discounted score alone",
    )


@dataclass(frozen=True)
class Estimates:
    """Advantages and returns of each token, by the policy's present values; no gradient."""

    advantages: Tensor  # (tokens,) float64
    returns: Tensor  # (tokens,) float64, what the values should have been


def ppo(branches: Branches, step: Step, options: PpoOptions) -> LossOutput:
    """-min(A p, A clip(p, 1 ± e)) + vf (V - R)^2 / 2 + kl log p (https://arxiv.org/abs/1707.06347).

    p is policy / reference of a token: the reference stands for the policy that wrote the data, as
    in HALOs (https://github.com/ContextualAI/HALOs). R = A + V before A is whitened, by its mean
    and its population's variance over all tokens of the step. Those two come from a pre-pass of
    the policy in evaluation mode; A itself is of the training pass. A modifier changes the p of
    the first term alone. The value head's gradient is clipped together with all others by
    `train.max_grad_norm`.
    """
    tokens = tokens_of(branches)
    estimates = estimates_of(branches, options)
    advantages = _whitened(estimates.advantages, step)
    values = _values(tokens)
    losses = (
        clipped(advantages, tokens.log_ratios, options.epsilon)
        + options.vf * 0.5 * (values - _targets(estimates, values, options.value_clip)).square()
        + options.kl * plain_log_ratios(tokens)
    )
    metrics = candidate_metrics(branches, advantages, options.epsilon) | {
        "values/mean": values.detach(),
        "values/errors": (values.detach() - estimates.returns).abs(),
    }
    return LossOutput(sums_of(losses, tokens.counts), metrics)


def pre_pass(branches: Branches, options: PpoOptions) -> Mapping[str, Tensor]:
    """The statistics of each branch for whitening: tokens, sum of A, squares around its mean.

    Squares around the branch's own mean lose no digits to scores that are far from 0.
    """
    tokens, counts = tokens_of(branches), tokens_of(branches).counts
    advantages = estimates_of(branches, options).advantages
    sums = sums_of(advantages, counts)
    around = advantages - tokens.of_each(sums / counts)
    squares = sums_of(around.square(), counts)
    return {"tokens": counts.double(), "advantages": sums, "squares": squares}


def estimates_of(branches: Branches, options: PpoOptions) -> Estimates:
    """GAE (https://arxiv.org/abs/1506.02438); the score is the reward of a branch's last token.

    Where the data gives labels instead of scores it is 1 or -1.

    d_t = reward_t + gamma V_(t+1) - V_t, where V is 0 behind the last token;
    A_t = sum over k >= 0 of (gamma lam)^k d_(t+k); R_t = A_t + V_t, or with value_target return
    the sum over k >= 0 of gamma^k reward_(t+k), as in HALOs.
    """
    tokens = tokens_of(branches)
    values = _values(tokens).detach()
    left = tokens.of_each(tokens.counts) - tokens.positions  # this token and those after it
    rewards = torch.where(left == 1, tokens.of_each(branches.scores), 0.0)
    deltas = rewards + options.gamma * _later(values, 1, left) - values
    advantages = _discounted(deltas, options.gamma * options.lam, left)
    if options.value_target == "return":
        return Estimates(advantages, _discounted(rewards, options.gamma, left))
    return Estimates(advantages, advantages + values)


def _discounted(deltas: Tensor, factor: float, left: Tensor) -> Tensor:
    """Sums over k >= 0 of factor^k d_(t+k) along each branch, in log2(tokens) rounds."""
    span, sums = 1, deltas
    while span < len(deltas):
        # Adding the sum of the token `span` later doubles the number of tokens in each sum.
        sums = sums + factor**span * _later(sums, span, left)
        span *= 2
    return sums


def _later(values: Tensor, by: int, left: Tensor) -> Tensor:
    """The value of the token `by` positions later, 0 where the branch has ended by then."""
    return pad(values, (0, by))[by:].masked_fill(left <= by, 0.0)


def _whitened(advantages: Tensor, step: Step) -> Tensor:
    """(A - mean) / sqrt(variance + 1e-8), both over all tokens of the step."""
    counts, sums = step.pre_pass["tokens"], step.pre_pass["advantages"]
    mean = sums.sum() / counts.sum()
    squares = step.pre_pass["squares"].sum() + (counts * (sums / counts - mean).square()).sum()
    return (advantages - mean) / (squares / counts.sum() + SMALLEST_VARIANCE).sqrt()


def _targets(estimates: Estimates, values: Tensor, value_clip: float) -> Tensor:
    """The targets of the value head, (tokens,), no gradient.

    PPO keeps a value near what it was when the data was written. One pass has only one value, so
    the return is moved to it instead: either way one update cannot take a value further.
    """
    if not value_clip:
        return estimates.returns
    now = values.detach()
    return now + (estimates.returns - now).clamp(-value_clip, value_clip)


def _values(tokens: Tokens) -> Tensor:
    assert tokens.values is not None, "a need for a value head is declared"
    return tokens.values


PPO = Method(
    name="ppo",
    summary="-min(A p, A clip(p)) + vf (V - R)^2 / 2 + kl log p, A = GAE",
    source="PPO, https://arxiv.org/abs/1707.06347",
    use="Scored answers whose good and bad parts differ: a value head weighs single tokens.",
    loss=ppo,
    options=PpoOptions,
    rewards=Rewards("r", lambda branches, _: branches.ratios),
    rows="grouped",
    items="tokens",
    needs=frozenset({"reference", "token_reference", "values", "scores"}),
    pre_pass=pre_pass,
    bad_score=-1.0,
    drawn_by_reference=True,
    head="values",
    modifiers=MODIFIERS,
)
