"""What methods share with other rooms: the completions of a step, its values, and means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

# paired: one chosen and one rejected branch per row, in this order.
# labelled: any number of desirable and undesirable branches per row.
# grouped: any number of candidates per row, each with a score.
# imitated: the branches worth imitating, chosen, desirable or best.
RowKind = Literal["paired", "labelled", "grouped", "imitated"]
Items = Literal["rows", "branches", "tokens", "chosen_tokens"]
Need = Literal["reference", "mismatched", "token_reference", "values", "purity", "scores"]
# The policy's head in addition to the vocabulary, or in its stead.
Head = Literal["none", "values", "score"]
ROUTING = "routing"  # the name of the routers' sums among the outputs of a forward pass


@dataclass(frozen=True)
class Tokens:
    """The completion tokens of a micro-batch, in the order row, branch, token."""

    counts: Tensor  # (branches,) int64
    logps: Tensor  # (tokens,) float64, with the gradient
    reference: Tensor | None = None  # (tokens,) float64, where a per-token reference is needed
    values: Tensor | None = None  # (tokens,) float64, with the gradient: of the value head
    purity: Tensor | None = None  # (tokens,) float64: log sum_v p_v ** 2, no gradient
    adjusted: Tensor | None = None  # (tokens,) log-ratios as a modifier has changed them

    @property
    def log_ratios(self) -> Tensor:
        """log(policy / reference) of each token, as modifiers have left it."""
        if self.adjusted is not None:
            return self.adjusted
        assert self.reference is not None, "a need for the per-token reference is declared"
        return self.logps - self.reference

    @property
    def positions(self) -> Tensor:
        """The position of each token in its branch, from 0: (tokens,) int64."""
        every = self.counts.new_ones(len(self.logps)).cumsum(0) - 1
        return every - self.of_each(self.counts.cumsum(0) - self.counts)

    def of_each(self, values: Tensor) -> Tensor:
        """Each branch's value, repeated for each of its tokens, (tokens,)."""
        # Passing output_size avoids a device-to-host sync.
        return values.repeat_interleave(self.counts, output_size=len(self.logps))


@dataclass(frozen=True)
class Branches:
    """The own branches of a micro-batch, in the order row, branch; it may hold none."""

    logps: Tensor  # (branches,) float64: the policy's sums, or its scores; with the gradient
    reference: Tensor  # (branches,) float64: the same sums under the reference
    num_tokens: Tensor  # (branches,) float64
    roles: Tensor  # (branches,) int8, as `Role` numbers them
    scores: Tensor  # (branches,) float64, NaN where the data gives none
    rows: Tensor  # (branches,) int64, rising: equal where two branches answer the same prompt
    step_indices: Tensor  # (branches,) int64: index in the whole step
    tokens: Tokens | None = None  # where something needs more than their sums
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # each (rows,) of the data
    routing: Tensor | None = None  # of a mixture of experts: sums over all tokens of the rows
    adjusted: Tensor | None = None  # (branches,) log-ratios as a modifier has changed them
    adjusted_logps: Tensor | None = None  # (branches,) log-probs as a modifier has changed them
    margin: Tensor | None = None  # (rows,) least reward margin of chosen over rejected
    rounding: float = 0.0  # by how much each of the sums may differ for how it was batched

    @property
    def ratios(self) -> Tensor:
        """r, log(policy / reference) of each branch, as modifiers have left it."""
        return self.logps - self.reference if self.adjusted is None else self.adjusted

    @property
    def compared_logps(self) -> Tensor:
        """lp of each branch, as modifiers have left it: to be compared, and not to be imitated."""
        return self.logps if self.adjusted_logps is None else self.adjusted_logps

    def once(self, value: Tensor) -> Tensor:
        """A number of the whole step, for a sum over micro-batches: 0 in all but the first one."""
        return value.masked_fill((self.step_indices != 0).all(), 0.0)

    def less(self, rounding: float) -> Branches:
        """The branches with every sum and log-ratio lowered by `rounding`."""
        adjusted = None if self.adjusted is None else self.adjusted - rounding
        compared = None if self.adjusted_logps is None else self.adjusted_logps - rounding
        return replace(
            self, logps=self.logps - rounding, adjusted=adjusted, adjusted_logps=compared
        )


@dataclass(frozen=True)
class Step:
    """Values of the whole optimizer step, over every micro-batch and rank."""

    rows: int
    branches: int
    tokens: int  # completion tokens of its own branches
    chosen_tokens: int  # those of chosen or desirable branches
    mismatched: Tensor  # (pairs,) float64 log-ratios of its mismatched branches, no gradient
    # The values of the method's pre-pass for every own branch of the step, in step order.
    pre_pass: Mapping[str, Tensor] = field(default_factory=dict)  # each (branches,) float64
    # Of the method, this step included: tensors (), until the step is read from its device.
    state: tuple[float | Tensor, ...] = ()
    routing: Tensor | None = None  # of its own branches, where the router loss needs it

    def count_of(self, items: Items) -> int:
        """The number of items that the loss is a mean over."""
        return int(getattr(self, items))


N = TypeVar("N", "Tensor", float)


@dataclass(frozen=True)
class Mean(Generic[N]):
    """A sum and its divisor: all that is reported is kept so, from the loss to metrics.jsonl.

    Both add up over micro-batches, ranks and the steps of a line, and are divided when it is
    written.
    """

    total: N  # a tensor () float64 until the step is read from its device
    count: float | N

    @staticmethod
    def of(values: Tensor, where: Tensor | None = None) -> Mean[Tensor]:
        """The mean of all values, or of those in a mask; boolean indexing would sync with a GPU."""
        values = values.detach().double()
        if where is None:
            return Mean(values.sum(), values.numel())
        return Mean(values.masked_fill(~where, 0.0).sum(), where.double().sum())

    def __add__(self, other: Mean[N]) -> Mean[N]:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> N:
        """The quotient; 0 for no items. The count has to be known on the host."""
        return self.total / (self.count or 1)


Metric: TypeAlias = "Tensor | Mean[Tensor]"  # a plain tensor is short for the mean of its values


@dataclass(frozen=True)
class Labels:
    """The number of branches of each label in the training rows."""

    desirable: int
    undesirable: int
