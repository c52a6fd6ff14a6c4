"""Learning to write what is good, without anything to compare it to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schemas.methods import LossOutput, Method
from .recipe import is_good

if TYPE_CHECKING:
    from ...schemas.methods import Branches, Step


@dataclass(frozen=True)
class SftOptions:
    """Options of sft, which has none."""


def sft(branches: Branches, _: Step, __: SftOptions) -> LossOutput:
    """-lp of good branches, divided by all their tokens (https://arxiv.org/abs/2203.02155).

    `nll` is the mean of -m over these branches, the loss that over their tokens.
    """
    good = is_good(branches)
    logps = branches.logps.detach()[good]
    metrics = {"nll": -logps / branches.num_tokens[good], "logps/chosen": logps}
    return LossOutput(-branches.logps.masked_fill(~good, 0.0), metrics)


SFT = Method(
    name="sft",
    summary="-lp of chosen or desirable completions",
    source="InstructGPT, https://arxiv.org/abs/2203.02155",
    use="Good completions only: to learn a format first, or beside another method in a mixture.",
    loss=sft,
    options=SftOptions,
    rows="imitated",
    items="chosen_tokens",
    modifiers=frozenset({"row_weight"}),
)
