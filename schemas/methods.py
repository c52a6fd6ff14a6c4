"""What a method is: a pure function over the log-probs of one step's branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

# paired: one chosen and one rejected branch per row, in this order.
# labelled: any number of desirable and undesirable branches per row.
RowKind = Literal["paired", "labelled"]
Items = Literal["rows", "branches"]


@dataclass(frozen=True)
class Branches:
    """The own branches of a micro-batch, in the order row, branch; it may hold none."""

    logps: Tensor  # (branches,) float64: the policy's sums, which carry the gradient
    reference: Tensor  # (branches,) float64: the same sums under the reference
    num_tokens: Tensor  # (branches,) float64
    roles: Tensor  # (branches,) int8, as `Role` numbers them
    scores: Tensor  # (branches,) float64, NaN where the data gives none
    rows: Tensor  # (branches,) int64, rising: equal where two branches answer the same prompt


@dataclass(frozen=True)
class Step:
    """What the whole optimizer step has in common, over every micro-batch and rank."""

    rows: int
    branches: int
    tokens: int  # completion tokens of its own branches
    chosen_tokens: int  # those of chosen or desirable branches
    mismatched: Tensor  # (pairs,) float64 log-ratios of its mismatched branches, no gradient


@dataclass(frozen=True)
class LossOutput:
    """The loss of each item, and values whose mean over the whole step is reported.

    Whoever runs the step divides by global counts, so nothing here is a mean. A metric without
    a value in the whole step is left out.
    """

    losses: Tensor  # (items,) float64
    metrics: Mapping[str, Tensor]  # each (any number,) and detached


@dataclass(frozen=True)
class Labels:
    """How many branches of each label the training rows hold."""

    desirable: int
    undesirable: int


@dataclass(frozen=True)
class Settled:
    """Options with nothing left to decide, and what a person should know about them."""

    options: Any
    advice: tuple[str, ...] = ()


Loss: TypeAlias = "Callable[[Branches, Step, Any], LossOutput]"


@dataclass(frozen=True)
class Method:
    """One line of the table: how a loss is named, and everything it needs."""

    name: str
    summary: str  # the formula, in a line
    source: str  # where it comes from
    loss: Loss
    options: type[Any]  # a frozen dataclass whose fields all have defaults
    rows: RowKind
    items: Items  # what the loss is a mean over
    needs_reference: bool
    needs_mismatched: bool
    settle: Callable[[Any, Labels], Settled] = lambda options, _: Settled(options)
    use: str = ""  # when to choose it, in a sentence
