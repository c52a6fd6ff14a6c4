"""The losses: one function per method, whose keyword arguments are the method's options.

For a completion, r is log(policy / reference), lp its log-prob, n its tokens, and m = lp / n. In a
pair, c is the chosen and l the rejected completion, and D = r_c - r_l. b is beta, e is
label_smoothing, S is the sigmoid and LS its log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from ...schemas.methods import Completions, Mean, Metric
from ...schemas.rows import Role
from .method import (
    CLAMPS,
    MARGIN,
    MEANS,
    PAIRS,
    RATIOS,
    Groups,
    KlUse,
    Labelled,
    MeanOrSum,
    Output,
    Pairs,
    Scope,
    Weight,
    grouped,
    imitated,
    labelled,
    option,
    paired,
    tokens_of,
)
from .metrics import MARGINS, REWARDS, higher
from .tensors import F, Tensor, bounded_exp, sums_of, torch

# Pairs, by the margin of their log-ratios.

by_margin = partial(paired, modifiers=RATIOS | PAIRS | MARGIN)


def smoothed(x: Tensor, e: float) -> Tensor:
    """-(1-e) LS(x) - e LS(-x): the loss if a share e of the pairs has swapped labels."""
    return -(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)


@paired(
    "-(1-e) LS(b D) - e LS(-b D)",
    "DPO, https://arxiv.org/abs/2305.18290",
    modifiers=RATIOS | PAIRS | MARGIN | CLAMPS,
)
def dpo(p: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Pairs with clear labels: the method to start with. label_smoothing makes it cDPO."""
    return smoothed(beta * p.D - p.target_margin, label_smoothing)


@paired(
    "-(1-e) LS(b D) - e LS(-b D)",
    "cDPO, https://ericmitchell.ai/cdpo.pdf",
    modifiers=RATIOS | PAIRS | MARGIN | CLAMPS,
)
def cdpo(p: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.2) -> Tensor:
    """Pairs of which some have swapped labels: the margin stops growing."""
    return smoothed(beta * p.D - p.target_margin, label_smoothing)


@by_margin("(-(1-e) LS(b D) + e LS(-b D)) / (1-2e)", "rDPO, https://arxiv.org/abs/2403.00409")
def robust(p: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """Pairs with a known share of wrong labels: unbiased, where cdpo is cautious."""
    x, e = beta * p.D - p.target_margin, label_smoothing
    return (e * F.logsigmoid(-x) - (1 - e) * F.logsigmoid(x)) / (1 - 2 * e)


@by_margin(
    "q (log q - log(1-e)) + (1-q) (log(1-q) - log e), q = S(b D)",
    "EXO, https://arxiv.org/abs/2402.00856",
)
def exo(
    p: Pairs,
    *,
    beta: float = 0.1,
    label_smoothing: Annotated[
        float, option("probability the target leaves to the rejected completion", gt=0, lt=0.5)
    ] = 0.001,
) -> Tensor:
    """Pairs, when the policy should settle on one good answer instead of covering all."""
    x, e = beta * p.D - p.target_margin, label_smoothing
    chosen = x.sigmoid() * (F.logsigmoid(x) - math.log1p(-e))
    return chosen + (-x).sigmoid() * (F.logsigmoid(-x) - math.log(e))


@by_margin("max(0, 1 - b D)", "RSO, https://arxiv.org/abs/2309.06657")
def hinge(p: Pairs, *, beta: float = 0.1) -> Tensor:
    """Pairs, when a pair whose margin is large enough should change nothing more."""
    return F.relu(1 - (beta * p.D - p.target_margin))


@by_margin(
    "(1-g) (-LS(b D)) + g exp(-b D), g = S(b D / tau)", "DiscoPOP, https://arxiv.org/abs/2406.08414"
)
def discopop(p: Pairs, *, beta: float = 0.05, tau: float = 0.05) -> Tensor:
    """Pairs, for comparison with a loss found by search; its gradient is wrong near D = 0."""
    x = beta * p.D - p.target_margin
    # One exponent, because far below 0 g is 0 and exp(-x) is infinite.
    return -(-x / tau).sigmoid() * F.logsigmoid(x) + bounded_exp(F.logsigmoid(x / tau) - x)


@paired(
    "(r_c/n_c - r_l/n_l - 1/(2b))^2",
    "IPO, https://arxiv.org/abs/2310.12036",
    rewards="b r/n, or b r with normalize sum",
    modifiers=PAIRS | CLAMPS,
)
def ipo(
    p: Pairs,
    *,
    beta: float = 0.1,
    normalize: Annotated[
        MeanOrSum,
        option("compare log-ratios per token, as the authors do, or of whole completions"),
    ] = "mean",
) -> Tensor:
    """Few or very clear pairs, for which dpo would push the margin without end."""
    return ((p.D_mean if normalize == "mean" else p.D) - 1 / (2 * beta)).square()


@paired(
    "-(1-e) LS(b d) - e LS(-b d), d = r_c/n_c - r_l/n_l",
    "Tulu 3, https://arxiv.org/abs/2411.15124",
    rewards="b r/n",
    modifiers=PAIRS,
)
def dpo_norm(p: Pairs, *, beta: float = 5.0, label_smoothing: float = 0.0) -> Tensor:
    """Pairs of very different lengths: dpo with each log-ratio divided by its length."""
    return smoothed(beta * p.D_mean, label_smoothing)


# Pairs, each side compared with the reference alone.


@paired("-LS(b r_c) - LS(-b r_c)/2 - LS(-b r_l)/2", "NCA, https://arxiv.org/abs/2402.05369")
def nca(p: Pairs, *, beta: float = 0.1) -> Tensor:
    """Pairs, when the likelihood of chosen completions must not fall as it does with dpo."""
    chosen, rejected = beta * p.r_c, beta * p.r_l
    return -F.logsigmoid(chosen) - (F.logsigmoid(-chosen) + F.logsigmoid(-rejected)) / 2


@paired("-LS(b r_c) - LS(-b r_l)", "BCO, https://arxiv.org/abs/2404.04656")
def bco_pair(p: Pairs, *, beta: float = 0.1) -> Tensor:
    """Pairs, when chosen must rise and rejected must fall, each by itself."""
    return -F.logsigmoid(beta * p.r_c) - F.logsigmoid(-(beta * p.r_l))


@paired("(r_c - 1/(2b))^2 + (r_l + 1/(2b))^2", "SPPO, https://arxiv.org/abs/2405.00675")
def sppo(p: Pairs, *, beta: float = 0.1) -> Tensor:
    """Pairs of the policy's own answers, round after round."""
    target = 1 / (2 * beta)
    return (p.r_c - target).square() + (p.r_l + target).square()


@paired("1 - S(b r_c) + S(b r_l)", "APO, https://arxiv.org/abs/2408.06266")
def apo_zero(p: Pairs, *, beta: float = 0.1) -> Tensor:
    """Pairs whose chosen completions are better than what the model writes now."""
    return (-(beta * p.r_c)).sigmoid() + (beta * p.r_l).sigmoid()


@paired("S(b r_c) + 1 - S(b D)", "APO, https://arxiv.org/abs/2408.06266")
def apo_down(p: Pairs, *, beta: float = 0.1) -> Tensor:
    """Pairs whose chosen completions are worse than what the model writes now."""
    return (beta * p.r_c).sigmoid() + (-beta * p.D).sigmoid()


# Pairs by rank over the whole step; `pre_pass` has the values of all its completions, in order.


def margins(values: Tensor) -> Tensor:
    """The chosen value minus the rejected value of every row of the step."""
    return values[0::2] - values[1::2]


def ranks(values: Tensor) -> Tensor:
    """The rank of each value; among equal values, the first in the step has the lower rank."""
    return values.argsort(stable=True).argsort()


def ordered(values: Tensor) -> Tensor:
    """The values in rising order."""
    return values.sort(stable=True).values


@paired(
    "-(1-e) LS(b d) - e LS(-b d), d = sort(lp_c-lp_l) less that of ref",
    "AOT, https://arxiv.org/abs/2406.05882",
    rewards="b r, margins and accuracies of b d",
    gathers={"policy": lambda of, _: of.logps, "reference": lambda of, _: of.reference},
    modifiers=(),
)
def aot(p: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Output:
    """Pairs, when margins should grow over the whole data rather than in each pair."""
    own_ranks = ranks(margins(p.step.pre_pass["policy"]))[p.index]
    reference = ordered(margins(p.step.pre_pass["reference"]))[own_ranks]
    x = beta * (p.lp_c - p.lp_l - reference)
    return Output(smoothed(x, label_smoothing), {MARGINS: x})


@paired(
    "-(1-e) LS(b d) - e LS(-b d), d = sort(r_c) - sort(r_l)",
    "AOT, https://arxiv.org/abs/2406.05882",
    rewards="b r, margins and accuracies of b d",
    gathers={"ratios": lambda of, _: of.ratios},
    modifiers=RATIOS,
)
def aot_unpaired(p: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Output:
    """Pairs, when all chosen completions of a step should be compared with all rejected ones."""
    # The two completions of one d may be in different micro-batches. Each is compared with the
    # other's gathered value, and adds half of the loss but its own full gradient.
    chosen, rejected = p.step.pre_pass["ratios"][0::2], p.step.pre_pass["ratios"][1::2]
    gains = beta * (p.r_c - ordered(rejected)[ranks(chosen)[p.index]])
    drops = beta * (ordered(chosen)[ranks(rejected)[p.index]] - p.r_l)
    of_gains, of_drops = smoothed(gains, label_smoothing), smoothed(drops, label_smoothing)
    losses = (of_gains - of_gains.detach() / 2) + (of_drops - of_drops.detach() / 2)
    return Output(losses, {MARGINS: gains})


# Pairs with scores: the policy's margin should be as large as the difference of the scores.

by_scores = partial(
    paired,
    source="RPO, https://arxiv.org/abs/2502.00203",
    needs={"reference", "scores"},
    modifiers=RATIOS | MEANS | PAIRS,
)


def divergence(some: Tensor, others: Tensor) -> Tensor:
    """KL(S(some) || S(others)) of two-way choices, from their log-odds."""
    likely = some.sigmoid() * (F.logsigmoid(some) - F.logsigmoid(others))
    return likely + (-some).sigmoid() * (F.logsigmoid(-some) - F.logsigmoid(-others))


@by_scores("(b D - eta Ds)^2, Ds = score_c - score_l")
def rpo_sq(p: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """Pairs with scores whose differences are reliable."""
    return (beta * p.D - eta * p.score_gap).square()


@by_scores("KL(S(eta Ds) || S(b D)), Ds = score_c - score_l")
def rpo_bwd_kl(p: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """Pairs with scores: as dpo, but nearly equal answers are kept nearly equal."""
    return divergence(eta * p.score_gap, beta * p.D)


@by_scores("KL(S(b D) || S(eta Ds)), Ds = score_c - score_l")
def rpo_fwd_kl(p: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """Pairs with scores: gives up on pairs that the policy ranks the other way."""
    return divergence(beta * p.D, eta * p.score_gap)


# Pairs without a reference: the policy's own log-probs.

free = partial(paired, needs=(), modifiers=PAIRS)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact at both ends (https://doi.org/10.18637/jss.v038.c01)."""
    # Each form gets only its own half: where() would spread a NaN gradient of the other one.
    far = torch.log1p(-torch.exp(x.clamp(max=-math.log(2))))
    near = torch.log(-torch.expm1(x.clamp(min=-math.log(2))))
    return torch.where(x < -math.log(2), far, near)


def log_odds(m: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(m), finite even where p rounds to 1."""
    below_one = m.clamp(max=-1e-10)  # closer to 0, the odds of a float32 log-prob are noise
    return below_one - log1mexp(below_one)


@free(
    "-m_c - lam LS(lo_c - lo_l), lo = m - log(1 - exp m)",
    "ORPO, https://arxiv.org/abs/2403.07691",
    rewards="lam m",
)
def orpo(
    p: Pairs,
    *,
    lam: Annotated[float, option("weight of the odds ratio beside the likelihood", gt=0)] = 0.1,
    nll_scope: Scope = "pair",
) -> Output:
    """Pairs and a base model: it learns to answer and to prefer at the same time."""
    odds = log_odds(p.m_c) - log_odds(p.m_l)
    nll = p.nll(nll_scope)
    rounding = p.completions.rounding
    # The odds rise with the mean log-prob.
    likelier = higher((p.m_c - p.m_l).detach(), rounding / p.n_c + rounding / p.n_l)
    metrics = {"nll": nll, "log_odds/ratio": odds, "log_odds/accuracy": likelier}
    return Output(nll - lam * F.logsigmoid(odds), metrics)


@free(
    "-LS(b (m_c - m_l) - b gamma_ratio)",
    "SimPO, https://arxiv.org/abs/2405.14734",
    rewards="b m",
    modifiers=PAIRS | CLAMPS,
)
def simpo(
    p: Pairs,
    *,
    beta: Annotated[float, option("scale of the difference between the two means", gt=0)] = 10.0,
    gamma_ratio: float = 0.3,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Pairs, when answers must not grow longer; its learning rate needs care."""
    difference = p.compared_c / p.n_c - p.compared_l / p.n_l
    return smoothed(beta * (difference - gamma_ratio), label_smoothing)


@free("-LS(b (lp_c - lp_l)) - alpha m_c", "CPO, https://arxiv.org/abs/2401.08417", rewards="b lp")
def cpo(
    p: Pairs,
    *,
    beta: Annotated[float, option("scale of the difference between the two sums", gt=0)] = 0.1,
    label_smoothing: float = 0.0,
    alpha: float = 1.0,
    nll_scope: Scope = "pair",
) -> Output:
    """Pairs whose chosen completion is worth imitating, for example in translation."""
    nll = p.nll(nll_scope)
    losses = smoothed(beta * (p.lp_c - p.lp_l), label_smoothing) + alpha * nll
    return Output(losses, {"nll": nll})


@free(
    "max(0, delta - lp_c + lp_l) - lam lp_c",
    "SLiC-HF, https://arxiv.org/abs/2305.10425",
    rewards="lp",
    modifiers=PAIRS | CLAMPS,
)
def slic(
    p: Pairs,
    *,
    delta: float = 1.0,
    lam: Annotated[float, option("weight of the chosen completion's likelihood", ge=0)] = 0.1,
    normalize: Annotated[
        MeanOrSum, option("likelihood of the whole chosen completion, or its mean per token")
    ] = "sum",
) -> Output:
    """Pairs, when those with a large enough margin should only be imitated."""
    nll = -(p.lp_c if normalize == "sum" else p.m_c)
    losses = F.relu(delta - p.compared_c + p.compared_l) + lam * nll
    return Output(losses, {"nll": nll})


# Labels: the sign ± is + for a desirable completion and - for an undesirable one.

against_z = partial(
    labelled, needs={"reference", "mismatched"}, modifiers=CLAMPS | MEANS | {"row_weight"}
)


@against_z(
    "w (1 - S(±b (r - z))), z = max(0, mean r of KL completions)",
    "KTO, https://arxiv.org/abs/2402.01306",
)
def kto(
    y: Labelled,
    *,
    beta: float = 0.1,
    desirable_weight: Weight = 1.0,
    undesirable_weight: Weight = 1.0,
    kl_per_step: int = 0,
    kl_use: KlUse = "rotate",
) -> Tensor:
    """Thumbs up and down instead of pairs, or pairs with many wrong labels."""
    x = beta * y.sign * (y.r - y.z)
    return y.weights(desirable_weight, undesirable_weight) * (-x).sigmoid()


@labelled("w (1 - S(±b r))", "HALOs, https://github.com/ContextualAI/HALOs")
def kto_zero(
    y: Labelled,
    *,
    beta: float = 0.1,
    desirable_weight: Weight = 1.0,
    undesirable_weight: Weight = 1.0,
) -> Tensor:
    """Like kto, but without KL completions: one forward pass less per step."""
    x = beta * y.sign * y.r
    return y.weights(desirable_weight, undesirable_weight) * (-x).sigmoid()


@against_z(
    "-w LS(±b (r - z)), z = max(0, mean r of KL completions)",
    "HALOs, https://github.com/ContextualAI/HALOs",
)
def kto_logsigmoid(
    y: Labelled,
    *,
    beta: float = 0.1,
    desirable_weight: Weight = 1.0,
    undesirable_weight: Weight = 1.0,
    kl_per_step: int = 0,
    kl_use: KlUse = "rotate",
) -> Tensor:
    """Labels without noise: unlike kto, it never gives up on a misjudged completion."""
    x = beta * y.sign * (y.r - y.z)
    return -y.weights(desirable_weight, undesirable_weight) * F.logsigmoid(x)


@labelled("desirable: 1 - S(b r); undesirable: S(b r)", "APO, https://arxiv.org/abs/2408.06266")
def apo_zero_unpaired(y: Labelled, *, beta: float = 0.1) -> Tensor:
    """Labels whose desirable completions are better than what the model writes now."""
    return (-beta * y.sign * y.r).sigmoid()


@labelled(
    "-LS(±(b r - d)), d = mean of b r over all steps so far",
    "BCO, https://arxiv.org/abs/2404.04656",
    gathers={"rewards": REWARDS["b r"]},
    keeps_mean="rewards",
)
def bco(y: Labelled, *, beta: float = 0.1) -> Output:
    """Labels without noise, from a cache without KL completions."""
    # d is over all completions of both labels, including this step's. Unlike in TRL, it does not
    # change between the micro-batches of a step, and undesirable completions are not weighted by
    # the similarity of their prompts to those of desirable ones (UDM).
    delta = y.lp.new_zeros(()) + (y.step.state[1] if y.step.state else 0.0)
    return Output(-F.logsigmoid(y.sign * (beta * y.r - delta)), {"bco/delta": y.once(delta)})


# Groups: several scored completions of a prompt. p = policy / reference of a token, where the
# reference is taken as the policy that wrote them. A modifier changes only the first term's p.


@grouped(
    "-min(A p, A clip(p)) + b (1/p - 1 + log p), A = (s - mean) / std",
    "GRPO, https://arxiv.org/abs/2402.03300",
    rewards="r, or r/n with normalize sequence",
    needs={"reference", "token_reference", "scores"},
)
def grpo(
    g: Groups,
    *,
    beta: Annotated[float, option("weight of the distance from the reference", ge=0)] = 0.01,
    epsilon: float = 0.2,
    normalize: Annotated[
        Literal["tokens", "sequence"],
        option("tokens: every token counts the same; sequence: every candidate"),
    ] = "tokens",
    std: Literal["sample", "population", "none"] = "sample",
    std_epsilon: float = 1e-4,
) -> Output:
    """Several scored answers to each prompt: better ones than the average gain, others lose."""
    advantages = g.tokens.of_each(standardized(g.scores, g.completions.rows, std, std_epsilon))
    losses = clipped(advantages, g.tokens.log_ratios, epsilon) + beta * distances(g)
    losses = sums_of(losses, g.tokens.counts)
    if normalize == "sequence":
        # The objective divides by the step's tokens: this leaves a mean of completions' means.
        losses = losses / g.n * (g.step.tokens / max(1, g.step.completions))
    return Output(losses, candidate_metrics(g, advantages, epsilon))


def standardized(scores: Tensor, rows: Tensor, std: str, epsilon: float) -> Tensor:
    """(s - mean) / (std + e) over the candidates of a prompt, (completions,); 0 for a single one.

    std divides by n - 1 and e is 1e-4, as in TRL; HALOs divides by n and adds 1e-2. Without std,
    prompts whose scores differ more weigh more (https://arxiv.org/abs/2503.20783).
    """
    # One entry per completion; the entries after the last row stay empty.
    sizes = torch.zeros_like(rows).index_add(0, rows, torch.ones_like(rows))
    deviations = scores - (sums_of(scores, sizes) / sizes)[rows]
    if std == "none":
        return deviations
    over = sizes - 1 if std == "sample" else sizes
    spread = (sums_of(deviations.square(), sizes) / over.clamp(min=1)).sqrt()
    return deviations / (spread[rows] + epsilon)


def clipped(advantages: Tensor, log_ratios: Tensor, epsilon: float) -> Tensor:
    """-min(A p, A clip(p, 1 ± e)) of each token, p = exp(log_ratio), (tokens,)."""
    p = bounded_exp(log_ratios)
    return -torch.minimum(advantages * p, advantages * p.clamp(1 - epsilon, 1 + epsilon))


def distances(g: Groups) -> Tensor:
    """1 / p - 1 + log p of each token, at least 0, with p before modifiers, (tokens,)."""
    return bounded_exp(-g.plain_ratios) - 1 + g.plain_ratios


def candidate_metrics(g: Groups, advantages: Tensor, epsilon: float) -> dict[str, Metric]:
    """The metrics of scored candidates.

    `rewards/scores` are the data's. `advantages/gained` is A (p - 1), the improvement of a token in
    the direction of its score. `clip/share` is the share of tokens that cannot gain more.
    """
    p = bounded_exp(g.tokens.log_ratios.detach())
    limited = p.clamp(1 - epsilon, 1 + epsilon)
    return {
        "rewards/scores": g.scores,
        "advantages/gained": advantages * (p - 1),
        "kl/tokens": distances(g),
        "clip/share": (advantages * limited < advantages * p).double(),
        "logps/candidates": g.lp,
    }


# GAE. A first pass gathers the inputs of whitening for each completion: its tokens, its sum of A,
# and its squares around its mean, which lose no digits if scores are far from 0.


def estimated(
    of: Completions, lam: float, gamma: float, value_target: str = "gae"
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each token, from the policy's current values; no gradient.

    GAE (https://arxiv.org/abs/1506.02438): the score is the reward of a completion's last token;
    data with labels instead of scores have 1 or -1.

    d_t = reward_t + gamma V_(t+1) - V_t, where V is 0 after the last token;
    A_t = sum over k >= 0 of (gamma lam)^k d_(t+k); R_t = A_t + V_t, or with value_target return
    the sum over k >= 0 of gamma^k reward_(t+k), as in HALOs.
    """
    tokens = tokens_of(of)
    assert tokens.values is not None, "a need for a value head is declared"
    values = tokens.values.detach()
    left = tokens.of_each(tokens.counts) - tokens.positions  # this token and those after it
    rewards = torch.where(left == 1, tokens.of_each(of.scores), 0.0)
    deltas = rewards + gamma * later(values, 1, left) - values
    advantages = discounted(deltas, gamma * lam, left)
    if value_target == "return":
        return advantages, discounted(rewards, gamma, left)
    return advantages, advantages + values


def discounted(deltas: Tensor, factor: float, left: Tensor) -> Tensor:
    """Sums over k >= 0 of factor^k d_(t+k) along each completion, in log2(tokens) rounds."""
    span, sums = 1, deltas
    while span < len(deltas):
        # Adding the sum of the token `span` later doubles the number of tokens in each sum.
        sums = sums + factor**span * later(sums, span, left)
        span *= 2
    return sums


def later(values: Tensor, by: int, left: Tensor) -> Tensor:
    """The value of the token `by` positions later; 0 after the completion's end."""
    return F.pad(values, (0, by))[by:].masked_fill(left <= by, 0.0)


def advantage_sums(of: Completions, options: Any) -> Tensor:
    """The sum of A over each completion."""
    advantages, _ = estimated(of, options.lam, options.gamma)
    return sums_of(advantages, tokens_of(of).counts)


def advantage_squares(of: Completions, options: Any) -> Tensor:
    """The squares of A around its mean over each completion."""
    advantages, _ = estimated(of, options.lam, options.gamma)
    tokens = tokens_of(of)
    around = advantages - tokens.of_each(sums_of(advantages, tokens.counts) / tokens.counts)
    return sums_of(around.square(), tokens.counts)


def whitened(advantages: Tensor, gathered: Mapping[str, Tensor]) -> Tensor:
    """(A - mean) / sqrt(variance + 1e-8), both over all tokens of the step.

    The 1e-8 keeps advantages finite if all of a step's are equal.
    """
    counts, sums = gathered["tokens"], gathered["advantages"]
    mean = sums.sum() / counts.sum()
    squares = gathered["squares"].sum() + (counts * (sums / counts - mean).square()).sum()
    return (advantages - mean) / (squares / counts.sum() + 1e-8).sqrt()


@grouped(
    "-min(A p, A clip(p)) + vf (V - R)^2 / 2 + kl log p, A = GAE",
    "PPO, https://arxiv.org/abs/1707.06347",
    rewards="r",
    needs={"reference", "token_reference", "values", "scores"},
    gathers={
        "tokens": lambda of, _: of.num_tokens,
        "advantages": advantage_sums,
        "squares": advantage_squares,
    },
    bad_score=-1.0,
    head="values",
)
def ppo(
    g: Groups,
    *,
    epsilon: float = 0.5,
    lam: Annotated[
        float, option("how far an advantage trusts rewards over values", ge=0, le=1)
    ] = 0.95,
    gamma: float = 0.99,
    vf: float = 0.01,
    kl: float = 0.1,
    value_clip: float = 0.0,
    value_target: Literal["gae", "return"] = "gae",
) -> Output:
    """Scored answers with good and bad parts: a value head weighs single tokens."""
    advantages, returns = estimated(g.completions, lam, gamma, value_target)
    advantages = whitened(advantages, g.step.pre_pass)
    values, targets = g.tokens.values, returns
    assert values is not None, "a need for a value head is declared"
    if value_clip:
        # PPO keeps a value near its old value. A single pass has no old value, so the return is
        # clipped around the current one: either way one update cannot move a value further.
        now = values.detach()
        targets = now + (returns - now).clamp(-value_clip, value_clip)
    losses = (
        clipped(advantages, g.tokens.log_ratios, epsilon)
        + vf * 0.5 * (values - targets).square()
        + kl * g.plain_ratios
    )
    metrics = candidate_metrics(g, advantages, epsilon) | {
        "values/mean": values,
        "values/errors": (values - returns).abs(),
    }
    return Output(sums_of(losses, g.tokens.counts), metrics)


# Likelihood alone: the loss is a mean over tokens, `nll` one over completions.


@imitated("-lp of chosen or desirable completions", "InstructGPT, https://arxiv.org/abs/2203.02155")
def sft(y: Labelled) -> Output:
    """Good completions only: to learn a format first, or in a mixture with another method."""
    metrics: dict[str, Metric] = {
        "nll": Mean.of(-y.lp / y.n, y.is_good),
        "logps/chosen": Mean.of(y.lp, y.is_good),
    }
    return Output(-y.lp.masked_fill(~y.is_good, 0.0), metrics)


def control_texts(options: Any) -> dict[Role, str]:
    """The text before a completion, by its label."""
    return {Role.DESIRABLE: options.good_token, Role.UNDESIRABLE: options.bad_token}


@labelled(
    "-lp given good_token or bad_token behind the prompt",
    "conditional training, https://arxiv.org/abs/2302.08582; HALOs",
    items="tokens",
    needs=(),
    rewards="",
    context=control_texts,
)
def csft(y: Labelled, *, good_token: str = "<|good|>", bad_token: str = "<|bad|>") -> Output:
    """Learns from bad completions too; prompt with the good token afterwards."""
    nll = -y.lp / y.n
    metrics: dict[str, Metric] = {
        "nll/desirable": Mean.of(nll, y.is_good),
        "nll/undesirable": Mean.of(nll, ~y.is_good),
    }
    return Output(-y.lp, metrics)


# Reward models: s, the score of the policy's head, replaces lp.


@paired(
    "-LS(s_c - s_l), s = the score of the policy's head",
    "InstructGPT, https://arxiv.org/abs/2203.02155",
    needs=(),
    rewards="s",
    head="score",
    modifiers=MARGIN | {"row_weight"},
)
def reward(p: Pairs) -> Tensor:
    """Pairs, to train a model that scores completions instead of one that writes them."""
    return -F.logsigmoid(p.lp_c - p.lp_l - p.target_margin)


@labelled(
    "-LS(±s), s = the score of the policy's head",
    "Verifiers, https://arxiv.org/abs/2110.14168",
    needs=(),
    rewards="s",
    head="score",
)
def reward_binary(y: Labelled) -> Tensor:
    """Labels, to train a model that classifies completions as desirable or not."""
    return -F.logsigmoid(y.sign * y.lp)
