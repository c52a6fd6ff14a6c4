"""Reward models: a score in place of the vocabulary, learned from what people preferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.functional import logsigmoid

from ...schemas.methods import LossOutput, Method
from .labelled import labelled_of
from .pairs import pairs_of
from .rewards import SCORES

if TYPE_CHECKING:
    from ...schemas.methods import Branches, Step


@dataclass(frozen=True)
class RewardOptions:
    """Options of reward and reward_binary, which have none."""


def reward(branches: Branches, _: Step, __: RewardOptions) -> LossOutput:
    """-LS(s_c - s_l), the Bradley-Terry model of scores s (https://arxiv.org/abs/2203.02155)."""
    pairs = pairs_of(branches)
    margins = pairs.chosen.logps - pairs.rejected.logps
    wanted = 0.0 if pairs.wanted is None else pairs.wanted
    return LossOutput(-logsigmoid(margins - wanted), {})


def reward_binary(branches: Branches, _: Step, __: RewardOptions) -> LossOutput:
    """-LS(±s): whether a branch is desirable, by its score s (https://arxiv.org/abs/2110.14168)."""
    return LossOutput(-logsigmoid(labelled_of(branches).signs * branches.logps), {})


REWARD = Method(
    name="reward",
    summary="-LS(s_c - s_l), s = what the policy's head answers",
    source="InstructGPT, https://arxiv.org/abs/2203.02155",
    use="Pairs, to train a model that scores completions instead of one that writes them.",
    loss=reward,
    options=RewardOptions,
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
    options=RewardOptions,
    rewards=SCORES,
    rows="labelled",
    items="branches",
    head="score",
    modifiers=frozenset({"row_weight"}),
)
