"""The completions and values of a step, as methods read them, and the means they report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

# paired: one chosen and one rejected completion per row, in this order.
# labelled: any number of desirable and undesirable completions per row.
# grouped: any number of candidates per row, each with a score.
# imitated: the completions to imitate: chosen, desirable or best.
RowKind = Literal["paired", "labelled", "grouped", "imitated"]
Items = Literal["rows", "completions", "tokens", "chosen_tokens"]
Need = Literal["reference", "mismatched", "token_reference", "values", "collision_logps", "scores"]
# A head beside the vocabulary's (values), or instead of it (score).
Head = Literal["none", "values", "score"]
ROUTING = "routing"  # the name of the routers' sums among the outputs of a forward pass


@dataclass(frozen=True)
class Tokens:
    """The completion tokens of a micro-batch, in the order row, completion, token."""

    counts: Tensor  # (completions,) int64
    logps: Tensor  # (tokens,) float64, with the gradient
    reference: Tensor | None = None  # (tokens,) float64, where a per-token reference is needed
    values: Tensor | None = None  # (tokens,) float64, with the gradient: of the value head
    collision_logps: Tensor | None = None  # (tokens,) float64: log sum_v p_v ** 2, no gradient
    adjusted: Tensor | None = None  # (tokens,) log-ratios after a modifier

    @property
    def log_ratios(self) -> Tensor:
        """log(policy / reference) of each token, after modifiers."""
        if self.adjusted is not None:
            return self.adjusted
        assert self.reference is not None, "a need for the per-token reference is declared"
        return self.logps - self.reference

    @property
    def positions(self) -> Tensor:
        """The position of each token in its completion, from 0: (tokens,) int64."""
        every = self.counts.new_ones(len(self.logps)).cumsum(0) - 1
        return every - self.of_each(self.counts.cumsum(0) - self.counts)

    def of_each(self, values: Tensor) -> Tensor:
        """Each completion's value, repeated for each of its tokens, (tokens,)."""
        # Passing output_size avoids a device-to-host sync.
        return values.repeat_interleave(self.counts, output_size=len(self.logps))


@dataclass(frozen=True)
class Completions:
    """A micro-batch's own completions, in the order row, completion; perhaps none."""

    logps: Tensor  # (completions,) float64: the policy's sums, or its scores; with the gradient
    reference: Tensor  # (completions,) float64: the same sums under the reference
    num_tokens: Tensor  # (completions,) float64
    roles: Tensor  # (completions,) int8, as `Role` numbers them
    scores: Tensor  # (completions,) float64, NaN where the data have none
    rows: Tensor  # (completions,) int64, rising: equal where two completions answer the same prompt
    step_indices: Tensor  # (completions,) int64: index in the whole step
    tokens: Tokens | None = None  # where the loss needs more than the sums
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # data columns, (rows,) each
    routing: Tensor | None = None  # a mixture of experts' sums over all tokens of the rows
    adjusted: Tensor | None = None  # (completions,) log-ratios after a modifier
    adjusted_logps: Tensor | None = None  # (completions,) log-probs after a modifier
    margin: Tensor | None = None  # (rows,) least reward margin of chosen over rejected
    rounding: float = 0.0  # how far each sum may vary with its batch

    @property
    def ratios(self) -> Tensor:
        """r, log(policy / reference) of each completion, after modifiers."""
        return self.logps - self.reference if self.adjusted is None else self.adjusted

    @property
    def compared_logps(self) -> Tensor:
        """lp of each completion after modifiers, for comparisons; imitation reads `logps`."""
        return self.logps if self.adjusted_logps is None else self.adjusted_logps

    def once(self, value: Tensor) -> Tensor:
        """The value in the step's first micro-batch and 0 in the others, so sums count it once."""
        return value.masked_fill((self.step_indices != 0).all(), 0.0)

    def less(self, rounding: float) -> Completions:
        """The completions with every sum and log-ratio lowered by `rounding`."""
        adjusted = None if self.adjusted is None else self.adjusted - rounding
        compared = None if self.adjusted_logps is None else self.adjusted_logps - rounding
        return replace(
            self, logps=self.logps - rounding, adjusted=adjusted, adjusted_logps=compared
        )


@dataclass(frozen=True)
class Step:
    """Values of the whole optimizer step, over every micro-batch and rank."""

    rows: int
    completions: int
    tokens: int  # of own completions
    chosen_tokens: int  # of chosen or desirable completions
    mismatched: Tensor  # (pairs,) float64 log-ratios of KL completions, no gradient
    # Values that the method's first pass gathers for every own completion, in step order.
    pre_pass: Mapping[str, Tensor] = field(default_factory=dict)  # each (completions,) float64
    # The method's state, with this step: tensors () until they are read from the device.
    state: tuple[float | Tensor, ...] = ()
    routing: Tensor | None = None  # of own completions, where the router loss needs it

    def count_of(self, items: Items) -> int:
        """The number of items over which the loss is averaged."""
        return int(getattr(self, items))


N = TypeVar("N", "Tensor", float)


@dataclass(frozen=True)
class Mean(Generic[N]):
    """A sum and its count, the form of every metric until a line of metrics.jsonl is written.

    Both are added over micro-batches, ranks and the steps of a line.
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
        """The mean; 0 for no items. The count must be a number on the host."""
        return self.total / (self.count or 1)


Metric: TypeAlias = "Tensor | Mean[Tensor]"  # a plain tensor means the mean of its values


@dataclass(frozen=True)
class Labels:
    """The number of completions of each label in the training rows."""

    desirable: int
    undesirable: int
