"""Methods for single labelled branches: KTO and its variants, and BCO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from ...schemas.methods import (
    Branches,
    Labels,
    LossOutput,
    ResolvedOptions,
    State,
    Step,
    beta,
)
from ...schemas.option import option
from .modifiers import CLAMPS, DIVIDES
from .rewards import Labelled, labelled_method, labelled_of
from .tensors import logsigmoid

if TYPE_CHECKING:
    from torch import Tensor

Weight: TypeAlias = Annotated[float, Field(gt=0)] | Literal["auto"]
# Of wD nD / (wU nU), https://arxiv.org/abs/2402.01306.
LOWEST, HIGHEST = 1.0, 1.5


def weight(label: str) -> Any:
    """The field for the weight of one label."""
    return option(1.0, f"weight of {label} branches; auto: as heavy in all as the other label")


def resolve_weights(options: Any, labels: Labels) -> ResolvedOptions:
    """The options with `auto` weights resolved, and a warning if one label weighs too little."""
    if not (labels.desirable and labels.undesirable):
        only = "desirable" if labels.desirable else "undesirable"
        return ResolvedOptions(
            _weighted(
                options, _or_one(options.desirable_weight), _or_one(options.undesirable_weight)
            ),
            (f"All training rows are {only}: a contrast cannot be learned from them.",),
        )
    resolved = _weighted(options, *_resolved(options, labels))
    return ResolvedOptions(resolved, _advice(resolved, labels))


def _resolved(options: Any, labels: Labels) -> tuple[float, float]:
    """The weights that make wD nD = wU nU; with both free, the larger class weighs 1."""
    desirable, undesirable = options.desirable_weight, options.undesirable_weight
    larger = max(labels.desirable, labels.undesirable)
    if desirable == undesirable == "auto":
        return larger / labels.desirable, larger / labels.undesirable
    if desirable == "auto":
        return undesirable * labels.undesirable / labels.desirable, undesirable
    if undesirable == "auto":
        return desirable, desirable * labels.desirable / labels.undesirable
    return desirable, undesirable


def _advice(options: Any, labels: Labels) -> tuple[str, ...]:
    ratio = (options.desirable_weight * labels.desirable) / (
        options.undesirable_weight * labels.undesirable
    )
    if LOWEST - 1e-9 <= ratio <= HIGHEST + 1e-9:
        return ()
    desirable = [options.desirable_weight * bound / ratio for bound in (LOWEST, HIGHEST)]
    undesirable = [options.undesirable_weight * ratio / bound for bound in (HIGHEST, LOWEST)]
    return (
        f"Desirable branches weigh {ratio:.3g} times as much as undesirable ones in all "
        f"({labels.desirable:,} x {options.desirable_weight:g} to {labels.undesirable:,} x "
        f"{options.undesirable_weight:g}); KTO wants {LOWEST:g} to {HIGHEST:g}. Set "
        f"method.desirable_weight between {desirable[0]:.4g} and {desirable[1]:.4g}, or "
        f"method.undesirable_weight between {undesirable[0]:.4g} and {undesirable[1]:.4g}, "
        "or both to auto.",
    )


def _or_one(value: Weight) -> float:
    return 1.0 if value == "auto" else value


def _weighted(options: Any, desirable: float, undesirable: float) -> Any:
    return replace(options, desirable_weight=desirable, undesirable_weight=undesirable)


@dataclass(frozen=True)
class KtoOptions:
    """Options of kto and kto_logsigmoid."""

    beta: float = beta(0.1)
    desirable_weight: Weight = weight("desirable")
    undesirable_weight: Weight = weight("undesirable")
    kl_per_step: int = option(
        0, "mismatched branches of a training step that enter z; 0: all", ge=0
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
    return LossOutput(losses, labelled.metrics(), facts=kl_facts(step))


def kto_logsigmoid(branches: Branches, step: Step, options: KtoOptions) -> LossOutput:
    """-w LS(±b (r - z)), an early KTO of HALOs (https://github.com/ContextualAI/HALOs)."""
    labelled = labelled_of(branches)
    x = options.beta * labelled.signs * (labelled.ratios - zero_point(step))
    losses = -_weights(labelled, options) * logsigmoid(x)
    return LossOutput(losses, labelled.metrics(), facts=kl_facts(step))


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
    """z, the policy's KL from the reference, estimated on mismatched branches: () float64.

    Clamped after the mean over the whole step: a mean of clamped parts would be too high.
    """
    return _mean(step.mismatched).clamp(min=0)


def kl_facts(step: Step) -> dict[str, Tensor]:
    """The count of the step's mismatched branches, and their mean log-ratio, raw and clamped."""
    facts = {"kl/pairs": step.mismatched.new_full((), len(step.mismatched))}
    if len(step.mismatched):
        facts |= {"kl/raw": _mean(step.mismatched), "kl/clamped": zero_point(step)}
    return facts


def _mean(values: Tensor) -> Tensor:
    return values.detach().sum() / max(1, len(values))


def _weights(labelled: Labelled, options: KtoOptions | KtoZeroOptions) -> Tensor:
    desirable, undesirable = options.desirable_weight, options.undesirable_weight
    assert desirable != "auto", "resolve_auto() comes before the first step"
    assert undesirable != "auto", "resolve_auto() comes before the first step"
    return labelled.weights(desirable, undesirable)


KTO = labelled_method(
    name="kto",
    summary="w (1 - S(±b (r - z))), z = max(0, mean of mismatched r)",
    source="KTO, https://arxiv.org/abs/2402.01306",
    use="Thumbs up and down instead of pairs, or pairs with many wrong labels.",
    loss=kto,
    options=KtoOptions,
    needs=frozenset({"reference", "mismatched"}),
    modifiers=CLAMPS | DIVIDES | {"row_weight"},
    resolve_auto=resolve_weights,
)
KTO_LOGSIGMOID = replace(
    KTO,
    name="kto_logsigmoid",
    summary="-w LS(±b (r - z)), z = max(0, mean of mismatched r)",
    source="HALOs, https://github.com/ContextualAI/HALOs",
    use="Labels without noise: unlike kto it never gives a misjudged branch up.",
    loss=kto_logsigmoid,
)
KTO_ZERO = labelled_method(
    name="kto_zero",
    summary="w (1 - S(±b r))",
    source="HALOs, https://github.com/ContextualAI/HALOs",
    use="As kto, from a cache without mismatched branches; a forward pass less per step.",
    loss=kto_zero,
    options=KtoZeroOptions,
    resolve_auto=resolve_weights,
)
APO_ZERO_UNPAIRED = labelled_method(
    name="apo_zero_unpaired",
    summary="desirable: 1 - S(b r); undesirable: S(b r)",
    source="APO, https://arxiv.org/abs/2408.06266",
    use="Labels whose desirable branches are better than what the model writes now.",
    loss=apo_zero_unpaired,
    options=ApoZeroUnpairedOptions,
)


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
    delta = branches.logps.new_zeros(()) + _mean_of(step.state)
    rewards = options.beta * labelled.ratios
    losses = -logsigmoid(labelled.signs * (rewards - delta))
    return LossOutput(losses, labelled.metrics(), facts={"bco/delta": delta.detach()})


def pre_pass_rewards(branches: Branches, options: BcoOptions) -> dict[str, Tensor]:
    """The rewards that enter d."""
    return {"rewards": options.beta * branches.ratios.detach()}


def update_mean_reward(state: State, pre_pass: Mapping[str, Tensor]) -> State:
    """The number of rewards so far, and their mean."""
    rewards, mean = pre_pass["rewards"], _mean_of(state)
    count = float(state[0] if state else 0.0) + len(rewards)
    # Differences first: sums of many steps would lose the last digits of a mean near zero.
    return (count, mean + (rewards - mean).sum() / max(1.0, count))


def _mean_of(state: State) -> float | Tensor:
    return state[1] if state else 0.0


BCO = labelled_method(
    name="bco",
    summary="-LS(±(b r - d)), d = mean of b r over all steps so far",
    source="BCO, https://arxiv.org/abs/2404.04656",
    use="Labels without noise, from a cache without mismatched branches.",
    loss=bco,
    options=BcoOptions,
    pre_pass=pre_pass_rewards,
    update_state=update_mean_reward,
)
