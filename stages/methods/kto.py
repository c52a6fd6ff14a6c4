"""Methods for branches that are judged one by one, KTO and its relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch.nn.functional import logsigmoid

from ...schemas.config import option
from ...schemas.methods import LossOutput, Method, beta, number
from .balance import Weight, settle_weights, weight
from .labelled import labelled_of
from .modifiers import CLAMPS
from .rewards import RATIOS

if TYPE_CHECKING:
    from torch import Tensor

    from ...schemas.methods import Branches, Step
    from .labelled import Labelled


@dataclass(frozen=True)
class KtoOptions:
    """Options of kto and kto_logsigmoid."""

    beta: float = beta(0.1)
    desirable_weight: Weight = weight("desirable")
    undesirable_weight: Weight = weight("undesirable")
    kl_per_step: int = number(
        0, "mismatched branches of a training step that enter z; 0: all", least=0
    )
    kl_use: Literal["rotate", "all"] = option(
        "rotate", "rotate: one partner of each branch, another one every epoch; all: all of them"
    )


@dataclass(frozen=True)
class KtoZeroOptions:
    """Options of kto_zero."""

    beta: float = beta(0.1)
    desirable_weight: Weight = weight("desirable")
    undesirable_weight: Weight = weight("undesirable")


@dataclass(frozen=True)
class ApoZeroUnpairedOptions:
    """Options of apo_zero_unpaired."""

    beta: float = beta(0.1)


def kto(branches: Branches, step: Step, options: KtoOptions) -> LossOutput:
    """w (1 - S(±b (r - z))), z = max(0, mean mismatched r) (https://arxiv.org/abs/2402.01306)."""
    labelled = labelled_of(branches)
    x = options.beta * labelled.signs * (labelled.ratios - zero_point(step))
    losses = _weights(labelled, options) * (-x).sigmoid()
    return LossOutput(losses, labelled.metrics() | kl_metrics(step, len(losses)))


def kto_logsigmoid(branches: Branches, step: Step, options: KtoOptions) -> LossOutput:
    """-w LS(±b (r - z)), an early KTO of HALOs (https://github.com/ContextualAI/HALOs)."""
    labelled = labelled_of(branches)
    x = options.beta * labelled.signs * (labelled.ratios - zero_point(step))
    losses = -_weights(labelled, options) * logsigmoid(x)
    return LossOutput(losses, labelled.metrics() | kl_metrics(step, len(losses)))


def kto_zero(branches: Branches, _: Step, options: KtoZeroOptions) -> LossOutput:
    """w (1 - S(±b r)), KTO with z = 0, of HALOs (https://github.com/ContextualAI/HALOs)."""
    labelled = labelled_of(branches)
    x = options.beta * labelled.signs * labelled.ratios
    losses = _weights(labelled, options) * (-x).sigmoid()
    return LossOutput(losses, labelled.metrics())


def apo_zero_unpaired(branches: Branches, _: Step, options: ApoZeroUnpairedOptions) -> LossOutput:
    """1 - S(b r) if desirable, else S(b r), APO-zero (https://arxiv.org/abs/2408.06266)."""
    labelled = labelled_of(branches)
    losses = (-options.beta * labelled.signs * labelled.ratios).sigmoid()
    return LossOutput(losses, labelled.metrics())


def zero_point(step: Step) -> Tensor:
    """z, the policy's distance from the reference as its mismatched branches show it, () float64.

    Clamped after the mean over the whole step: a mean of clamped parts would lie too high.
    """
    return _mean(step.mismatched).clamp(min=0)


def kl_metrics(step: Step, count: int) -> dict[str, Tensor]:
    """The step's facts once per item, so that their mean over the step is the fact itself."""
    pairs = step.mismatched.new_tensor(float(len(step.mismatched)))
    values = {"kl/pairs": pairs}
    if len(step.mismatched):
        values |= {"kl/raw": _mean(step.mismatched), "kl/clamped": zero_point(step)}
    return {name: value.repeat(count) for name, value in values.items()}


def _mean(values: Tensor) -> Tensor:
    return values.detach().sum() / max(1, len(values))


def _weights(labelled: Labelled, options: KtoOptions | KtoZeroOptions) -> Tensor:
    desirable, undesirable = options.desirable_weight, options.undesirable_weight
    assert desirable != "auto", "settle() comes before the first step"
    assert undesirable != "auto", "settle() comes before the first step"
    return labelled.weights(desirable, undesirable)


KTO = Method(
    name="kto",
    summary="w (1 - S(±b (r - z))), z = max(0, mean of mismatched r)",
    source="KTO, https://arxiv.org/abs/2402.01306",
    use="Thumbs up and down instead of pairs, or pairs with many wrong labels.",
    loss=kto,
    options=KtoOptions,
    rewards=RATIOS,
    rows="labelled",
    items="branches",
    needs=frozenset({"reference", "mismatched"}),
    modifiers=CLAMPS | {"row_weight"},
    settle=settle_weights,
)
KTO_LOGSIGMOID = Method(
    name="kto_logsigmoid",
    summary="-w LS(±b (r - z)), z = max(0, mean of mismatched r)",
    source="HALOs, https://github.com/ContextualAI/HALOs",
    use="Labels without noise: unlike kto it never gives a misjudged branch up.",
    loss=kto_logsigmoid,
    options=KtoOptions,
    rewards=RATIOS,
    rows="labelled",
    items="branches",
    needs=frozenset({"reference", "mismatched"}),
    modifiers=CLAMPS | {"row_weight"},
    settle=settle_weights,
)
KTO_ZERO = Method(
    name="kto_zero",
    summary="w (1 - S(±b r))",
    source="HALOs, https://github.com/ContextualAI/HALOs",
    use="As kto, from a cache without mismatched branches; a forward pass less per step.",
    loss=kto_zero,
    options=KtoZeroOptions,
    rewards=RATIOS,
    rows="labelled",
    items="branches",
    needs=frozenset({"reference"}),
    modifiers=frozenset({"row_weight"}),
    settle=settle_weights,
)
APO_ZERO_UNPAIRED = Method(
    name="apo_zero_unpaired",
    summary="desirable: 1 - S(b r); undesirable: S(b r)",
    source="APO, https://arxiv.org/abs/2408.06266",
    use="Labels whose desirable branches are better than what the model writes now.",
    loss=apo_zero_unpaired,
    options=ApoZeroUnpairedOptions,
    rewards=RATIOS,
    rows="labelled",
    items="branches",
    needs=frozenset({"reference"}),
    modifiers=frozenset({"row_weight"}),
)
