"""What desirable and undesirable branches weigh against each other."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

from ...schemas.methods import Labels, Settled, number

Weight: TypeAlias = 'float | Literal["auto"]'
# Of wD nD / (wU nU), https://arxiv.org/abs/2402.01306.
LOWEST, HIGHEST = 1.0, 1.5


def weight(label: str) -> Any:
    """The field for the weight of one label."""
    return number(
        1.0, f"weight of {label} branches; auto: as heavy in all as the other label", above=0
    )


def settle_weights(options: Any, labels: Labels) -> Settled:
    """Turns `auto` into numbers, and warns of weights that leave one label too light."""
    if not (labels.desirable and labels.undesirable):
        only = "desirable" if labels.desirable else "undesirable"
        return Settled(
            _weighted(
                options, _or_one(options.desirable_weight), _or_one(options.undesirable_weight)
            ),
            (f"All training rows are {only}: a contrast cannot be learned from them.",),
        )
    settled = _weighted(options, *_resolved(options, labels))
    return Settled(settled, _advice(settled, labels))


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
    heavier = [options.desirable_weight * bound / ratio for bound in (LOWEST, HIGHEST)]
    lighter = [options.undesirable_weight * ratio / bound for bound in (HIGHEST, LOWEST)]
    return (
        f"Desirable branches weigh {ratio:.3g} times as much as undesirable ones in all "
        f"({labels.desirable:,} x {options.desirable_weight:g} to {labels.undesirable:,} x "
        f"{options.undesirable_weight:g}); KTO wants {LOWEST:g} to {HIGHEST:g}. Set "
        f"method.desirable_weight between {heavier[0]:.4g} and {heavier[1]:.4g}, or "
        f"method.undesirable_weight between {lighter[0]:.4g} and {lighter[1]:.4g}, "
        "or both to auto.",
    )


def _or_one(value: Weight) -> float:
    return 1.0 if value == "auto" else value


def _weighted(options: Any, desirable: float, undesirable: float) -> Any:
    return dataclasses.replace(options, desirable_weight=desirable, undesirable_weight=undesirable)
