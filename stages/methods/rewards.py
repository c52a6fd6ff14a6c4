"""Rewards of pairs and of labelled branches, their metrics, and the losses of reward models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ...schemas.methods import (
    Branches,
    LossOutput,
    Mean,
    Method,
    Metric,
    Normalize,
    Rewards,
    RowKind,
    Step,
)
from ...schemas.rows import Role
from .modifiers import SEES_RATIOS, WEIGHS_PAIRS
from .tensors import logsigmoid, torch

if TYPE_CHECKING:
    from torch import Tensor


def scaled_ratios(branches: Branches, options: Any) -> Tensor:
    """beta * r, (branches,)."""
    return branches.ratios * float(options.beta)


def scaled_mean_ratios(branches: Branches, options: Any) -> Tensor:
    """beta * r / n, (branches,), for methods that divide each branch by its own length."""
    return scaled_ratios(branches, options) / branches.num_tokens


def scores(branches: Branches, _: Any) -> Tensor:
    """The score of each branch under a reward model, (branches,)."""
    return branches.logps


RATIOS = Rewards("b r", scaled_ratios)
MEAN_RATIOS = Rewards("b r/n", scaled_mean_ratios)
SCORES = Rewards("s", scores)

# The fields that most methods of pairs, and most of labels, have in common.
paired_method = partial(
    Method,
    rows="paired",
    items="rows",
    needs=frozenset({"reference"}),
    rewards=RATIOS,
    modifiers=SEES_RATIOS | WEIGHS_PAIRS,
)
labelled_method = partial(
    Method,
    rows="labelled",
    items="branches",
    needs=frozenset({"reference"}),
    rewards=RATIOS,
    modifiers=frozenset({"row_weight"}),
)


MARGINS = "rewards/margins"


def reward_metrics(
    rewards: Tensor,
    rounding: Tensor,
    branches: Branches,
    kind: RowKind,
    margins: Tensor | None = None,
) -> dict[str, Metric]:
    """The reward metrics of a micro-batch of rows of this kind.

    Every row, branch or pair of candidates counts the same; `row_weight` changes nothing here.
    `rounding` is by how much each reward moves when its branch's sum of log-probs moves by its
    rounding, (branches,). `margins` replaces the differences of a pair's rewards.
    """
    if kind == "paired":
        chosen, rejected = rewards[0::2], rewards[1::2]
        gaps = chosen - rejected if margins is None else margins
        rates = compared(gaps, rounding[0::2] + rounding[1::2])
        sides = {"rewards/chosen": chosen, "rewards/rejected": rejected}
        return {**sides, MARGINS: gaps, **rates}
    if kind == "grouped":
        rows, given = branches.rows, branches.scores
        is_pair = (rows[:, None] == rows) & (given[:, None] > given)
        return compared(rewards[:, None] - rewards, rounding[:, None] + rounding, is_pair)
    is_desirable = branches.roles == Role.DESIRABLE
    return {
        "rewards/chosen": Mean.of(rewards, is_desirable),
        "rewards/rejected": Mean.of(rewards, ~is_desirable),
        **_rows_compared(rewards, rounding, branches.rows, is_desirable),
    }


def compared(gaps: Tensor, rounding: Tensor, is_counted: Tensor | None = None) -> dict[str, Metric]:
    """The accuracy of the gaps, a tie counted half, and the rate of ties."""
    accuracies, ties = higher(gaps, rounding), is_tie(gaps, rounding).double()
    if is_counted is None:
        return {"rewards/accuracies": accuracies, "rewards/ties": ties}
    masked = Mean.of(accuracies, is_counted), Mean.of(ties, is_counted)
    return dict(zip(("rewards/accuracies", "rewards/ties"), masked, strict=True))


def higher(gaps: Tensor, rounding: Tensor) -> Tensor:
    """1 for a gap above 0, 0 for one below, and 0.5 for a tie, float64."""
    return (gaps > 0).double().masked_fill(is_tie(gaps, rounding), 0.5)


def is_tie(gaps: Tensor, rounding: Tensor) -> Tensor:
    """Whether each gap is at most the rounding of both its sides together, bool."""
    return gaps.abs() <= rounding


def with_margin(means: Mapping[str, float]) -> dict[str, float]:
    """The means of a whole step, with rewards/margins if it has both labels."""
    either = ("rewards/chosen", "rewards/rejected")
    if MARGINS in means or not all(name in means for name in either):
        return dict(means)
    return {**means, MARGINS: means[either[0]] - means[either[1]]}


def _rows_compared(
    rewards: Tensor, rounding: Tensor, rows: Tensor, is_desirable: Tensor
) -> dict[str, Metric]:
    """Accuracy over rows with both labels: whether the desirable mean is the higher one."""
    desirable, undesirable = (
        _means_by_row(torch.stack([rewards, rounding]), rows, which)
        for which in (is_desirable, ~is_desirable)
    )
    both = desirable[0].isfinite() & undesirable[0].isfinite()
    return compared(desirable[0] - undesirable[0], desirable[1] + undesirable[1], both)


def row_margins(
    rewards: Tensor, rounding: Tensor, rows: Tensor, is_good: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean reward of a row's good branches less that of its bad ones, and its rounding.

    Of a row with one side only the other counts as 0. (branches,) each: a row's is at its number.
    """
    values = torch.stack([rewards, rounding])
    sides = []
    for which in (is_good, ~is_good):
        is_there = rewards.new_zeros(len(rows)).index_add(0, rows, which.to(rewards.dtype)) > 0
        sides.append(_means_by_row(values, rows, which).masked_fill(~is_there, 0.0))
    good, bad = sides
    return good[0] - bad[0], good[1] + bad[1]


def _means_by_row(values: Tensor, rows: Tensor, which: Tensor) -> Tensor:
    """Means by row of values (kinds, branches); NaN for a row without a branch in `which`."""
    none = torch.zeros_like(values)  # one column per branch: there are no more rows than those
    totals = none.index_add(1, rows, values.masked_fill(~which, 0.0))
    return totals / none[0].index_add(0, rows, which.to(none.dtype))


class ReferencedOptions(Protocol):
    """The options of every paired method with a reference."""

    @property
    def beta(self) -> float:
        """Scale of the rewards."""
        ...

    @property
    def sft_weight(self) -> float:
        """The weight of the chosen branch's negative log-likelihood."""
        ...

    @property
    def sft_normalize(self) -> Normalize:
        """Whether that is a mean per token or a sum."""
        ...


@dataclass(frozen=True)
class Side:
    """The chosen or the rejected branch of every row."""

    logps: Tensor  # (rows,) float64, as are the others
    compared_logps: Tensor  # logps as modifiers have left them
    num_tokens: Tensor
    ratios: Tensor  # r, log(policy / reference) of the completion, as modifiers have left it

    @property
    def mean_ratios(self) -> Tensor:
        """The log-ratio per token, r / n."""
        return self.ratios / self.num_tokens

    @property
    def mean_logps(self) -> Tensor:
        """The policy's log-prob per token, m."""
        return self.logps / self.num_tokens

    @property
    def mean_compared_logps(self) -> Tensor:
        """m, as modifiers have left it."""
        return self.compared_logps / self.num_tokens


@dataclass(frozen=True)
class Pairs:
    """One chosen and one rejected branch per row."""

    chosen: Side
    rejected: Side
    wanted: Tensor | None = None  # (rows,) the margin that x has to exceed

    @property
    def margins(self) -> Tensor:
        """D = r_c - r_l, the margin of log-ratios of chosen over rejected."""
        return self.chosen.ratios - self.rejected.ratios

    @property
    def mean_margins(self) -> Tensor:
        """The margin per token, r_c / n_c - r_l / n_l."""
        return self.chosen.mean_ratios - self.rejected.mean_ratios

    def scaled_margins(self, beta: float) -> Tensor:
        """x = beta * D, minus the margin that the data asks for."""
        x = beta * self.margins
        return x if self.wanted is None else x - self.wanted


def pairs_of(branches: Branches) -> Pairs:
    """The two sides of a micro-batch of paired rows."""
    return Pairs(_side(branches, first=0), _side(branches, first=1), branches.margin)


def referenced_output(pairs: Pairs, losses: Tensor, options: ReferencedOptions) -> LossOutput:
    """Losses + sft_weight * nll_c, a mean per token (https://arxiv.org/abs/2404.19733) or a sum.

    The metric is the mean either way.
    """
    nll = -pairs.chosen.mean_logps
    metrics = logp_metrics(pairs) | {"nll": nll.detach()}
    imitated = nll if options.sft_normalize == "mean" else -pairs.chosen.logps
    return LossOutput(losses + options.sft_weight * imitated, metrics)


def logp_metrics(pairs: Pairs) -> dict[str, Metric]:
    """The policy's log-probs of either side, as metrics."""
    return {
        "logps/chosen": pairs.chosen.logps.detach(),
        "logps/rejected": pairs.rejected.logps.detach(),
    }


def _side(branches: Branches, *, first: int) -> Side:
    every_other = slice(first, None, 2)
    return Side(
        logps=branches.logps[every_other],
        compared_logps=branches.compared_logps[every_other],
        num_tokens=branches.num_tokens[every_other],
        ratios=branches.ratios[every_other],
    )


@dataclass(frozen=True)
class Labelled:
    """Labelled branches, each by itself."""

    logps: Tensor  # (branches,) float64
    ratios: Tensor  # (branches,) float64, r = log(policy / reference), as modifiers have left it
    is_desirable: Tensor  # (branches,) bool

    @property
    def signs(self) -> Tensor:
        """+1 for desirable and -1 for undesirable branches, (branches,) float64."""
        return self.weights(1.0, -1.0)

    def weights(self, desirable: float, undesirable: float) -> Tensor:
        """The weight of each branch, (branches,) float64."""
        # Tensors, for torch.where() makes float32 of two plain numbers.
        high, low = self.ratios.new_full((), desirable), self.ratios.new_full((), undesirable)
        return torch.where(self.is_desirable, high, low)

    def metrics(self) -> dict[str, Metric]:
        """Log-probs by label; desirable is reported as chosen."""
        logps = self.logps.detach()
        return {
            "logps/chosen": Mean.of(logps, self.is_desirable),
            "logps/rejected": Mean.of(logps, ~self.is_desirable),
        }


def labelled_of(branches: Branches) -> Labelled:
    """The labelled branches of a micro-batch."""
    return Labelled(branches.logps, branches.ratios, branches.roles == Role.DESIRABLE)


@dataclass(frozen=True)
class RewardLossOptions:
    """Options of reward and reward_binary, which have none."""


def reward(branches: Branches, _: Step, __: RewardLossOptions) -> LossOutput:
    """-LS(s_c - s_l), the Bradley-Terry model of scores s (https://arxiv.org/abs/2203.02155)."""
    pairs = pairs_of(branches)
    margins = pairs.chosen.logps - pairs.rejected.logps
    wanted = 0.0 if pairs.wanted is None else pairs.wanted
    return LossOutput(-logsigmoid(margins - wanted), {})


def reward_binary(branches: Branches, _: Step, __: RewardLossOptions) -> LossOutput:
    """-LS(±s): whether a branch is desirable, by its score s (https://arxiv.org/abs/2110.14168)."""
    return LossOutput(-logsigmoid(labelled_of(branches).signs * branches.logps), {})


REWARD = Method(
    name="reward",
    summary="-LS(s_c - s_l), s = what the policy's head answers",
    source="InstructGPT, https://arxiv.org/abs/2203.02155",
    use="Pairs, to train a model that scores completions instead of one that writes them.",
    loss=reward,
    options=RewardLossOptions,
    rewards=SCORES,
    rows="paired",
    items="rows",
    head="score",
    modifiers=frozenset({"margin", "row_weight"}),
)
REWARD_BINARY = Method(
    name="reward_binary",
    summary="-LS(±s), s = what the policy's head answers",
    source="Verifiers, https://arxiv.org/abs/2110.14168",
    use="Labels, to train a model that tells desirable completions from undesirable ones.",
    loss=reward_binary,
    options=RewardLossOptions,
    rewards=SCORES,
    rows="labelled",
    items="branches",
    head="score",
    modifiers=frozenset({"row_weight"}),
)
