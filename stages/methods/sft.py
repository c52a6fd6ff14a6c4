"""SFT on good completions, and CSFT on all of them, each after a token for its label."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.methods import Branches, LossOutput, Mean, Method, Step
from ...schemas.option import option
from ...schemas.rows import Role
from .recipe import is_good


@dataclass(frozen=True)
class SftOptions:
    """Options of sft, which has none."""


def sft(branches: Branches, _: Step, __: SftOptions) -> LossOutput:
    """-lp of good branches, divided by all their tokens (https://arxiv.org/abs/2203.02155).

    `nll` is the mean of -m over these branches, the loss that over their tokens.
    """
    good = is_good(branches)
    logps = branches.logps.detach()
    metrics = {
        "nll": Mean.of(-logps / branches.num_tokens, good),
        "logps/chosen": Mean.of(logps, good),
    }
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


@dataclass(frozen=True)
class CsftOptions:
    """Options of csft."""

    good_token: str = option("<|good|>", "text between the prompt and a desirable completion")
    bad_token: str = option("<|bad|>", "text between the prompt and an undesirable completion")


def csft(branches: Branches, _: Step, __: CsftOptions) -> LossOutput:
    """-lp of each branch given its control token (https://arxiv.org/abs/2302.08582)."""
    means = -(branches.logps / branches.num_tokens).detach()
    good = is_good(branches)
    metrics = {"nll/desirable": Mean.of(means, good), "nll/undesirable": Mean.of(means, ~good)}
    return LossOutput(-branches.logps, metrics)


def control_texts(options: CsftOptions) -> dict[Role, str]:
    """The text before a completion, by its label."""
    return {Role.DESIRABLE: options.good_token, Role.UNDESIRABLE: options.bad_token}


CSFT = Method(
    name="csft",
    summary="-lp given good_token or bad_token behind the prompt",
    source="conditional training, https://arxiv.org/abs/2302.08582; HALOs",
    use="Bad completions are worth learning from too; ask for good ones by their token afterwards.",
    loss=csft,
    options=CsftOptions,
    rows="labelled",
    items="tokens",
    modifiers=frozenset({"row_weight"}),
    context=control_texts,
)
