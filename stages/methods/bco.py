"""BCO: each branch is told apart from the mean reward of all that were seen so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.functional import logsigmoid

from ...schemas.methods import LossOutput, Method, beta
from .labelled import labelled_of
from .rewards import RATIOS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ...schemas.methods import Branches, Step


@dataclass(frozen=True)
class BcoOptions:
    """Options of bco."""

    beta: float = beta(0.1)


def bco(branches: Branches, step: Step, options: BcoOptions) -> LossOutput:
    """-LS(±(b r - d)), d = mean of b r over all steps so far (https://arxiv.org/abs/2404.04656).

    d holds every branch of either label, those of this step included, and is 0 before the first
    step. Unlike TRL's, it does not move between the micro-batches of a step, and undesirable
    branches are not weighed by how much their prompts resemble those of desirable ones (UDM).
    """
    labelled = labelled_of(branches)
    delta = branches.logps.new_tensor(_mean_of(step.memory))
    rewards = options.beta * labelled.ratios
    losses = -logsigmoid(labelled.signs * (rewards - delta))
    # Once per item, so that its mean over the step is itself.
    metrics = labelled.metrics() | {"bco/delta": delta.repeat(len(losses))}
    return LossOutput(losses, metrics)


def survey_rewards(branches: Branches, options: BcoOptions) -> dict[str, Tensor]:
    """The rewards that enter d."""
    return {"rewards": options.beta * branches.ratios.detach()}


def remember_rewards(
    memory: tuple[float, ...], surveyed: Mapping[str, Tensor]
) -> tuple[float, ...]:
    """How many rewards were seen, and their mean."""
    rewards, mean = surveyed["rewards"], _mean_of(memory)
    count = (memory[0] if memory else 0.0) + len(rewards)
    # Differences first: sums of many steps would lose the last digits of a mean near zero.
    return (count, mean + (rewards - mean).sum().item() / max(1.0, count))


def _mean_of(memory: tuple[float, ...]) -> float:
    return memory[1] if memory else 0.0


BCO = Method(
    name="bco",
    summary="-LS(±(b r - d)), d = mean of b r over all steps so far",
    source="BCO, https://arxiv.org/abs/2404.04656",
    use="Labels without noise, from a cache without mismatched branches.",
    loss=bco,
    options=BcoOptions,
    rewards=RATIOS,
    rows="labelled",
    items="branches",
    needs=frozenset({"reference"}),
    survey=survey_rewards,
    remember=remember_rewards,
    modifiers=frozenset({"row_weight"}),
)
