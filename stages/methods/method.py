"""A method is one function: it returns a loss, and its keyword arguments are its options.

Its decorator gives the formula and the source, its docstring when to use it. The checked options,
`align methods`, the table in the docs and `align.losses` are made from these and from OPTIONS. A
function gets the completions of a micro-batch under the names of its formula. It returns one number
per row or per completion, never a mean: the objective divides the sum over the whole step by one
count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from ...schemas.methods import (
    Completions,
    Head,
    Items,
    Mean,
    Metric,
    Need,
    RowKind,
    Step,
    Tokens,
)
from ...schemas.option import STRICT
from ...schemas.rows import Role
from .tensors import Tensor, torch

Scope = Literal["pair", "global_tokens"]
MeanOrSum = Literal["mean", "sum"]
KlUse = Literal["rotate", "all"]
Weight: TypeAlias = Annotated[float, Field(gt=0)] | Literal["auto"]


def option(meaning: str, **bounds: Any) -> Any:
    """An option's meaning, for `align methods` and the help of its flag, and its bounds."""
    return Field(description=meaning, **bounds)


# The meaning of each option by name. A method with another meaning or other bounds annotates the
# argument in its signature.
OPTIONS: dict[str, Any] = {
    "alpha": option("weight of the chosen completion's likelihood", ge=0),
    "bad_token": option("text between the prompt and an undesirable completion"),
    "beta": option("how far the policy may go: lower lets it go further", gt=0),
    "delta": option("target margin between the two sums, in nats", gt=0),
    "desirable_weight": option("weight of desirable completions; auto: balances the two labels"),
    "epsilon": option("a token gains nothing beyond a ratio of 1 ± this", gt=0, lt=1),
    "eta": option("target margin per point between the two scores", gt=0),
    "gamma": option("discount of a reward per token", ge=0, le=1),
    "gamma_ratio": option("target margin between the two means", ge=0),
    "good_token": option("text between the prompt and a desirable completion"),
    "kl": option("weight of log p, which keeps a token near the reference", ge=0),
    "kl_per_step": option("KL completions of a training step that enter z; 0: all", ge=0),
    "kl_use": option(
        "rotate: one KL completion per completion, another one every epoch; all: all of them"
    ),
    "label_smoothing": option("assumed share of pairs with swapped labels", ge=0, lt=0.5),
    "nll_scope": option(
        "pair: every chosen completion counts the same; global_tokens: every chosen token of a step"
    ),
    "sft_normalize": option(
        "likelihood that sft_weight adds: a mean per token, or the whole completion's sum"
    ),
    "sft_weight": option("adds this much of the chosen completion's likelihood, as RPO does", ge=0),
    "std": option("standard deviation of scores: over n - 1, over n, or scores are not divided"),
    "std_epsilon": option("added to the standard deviation", gt=0),
    "tau": option("width of the switch between the two parts", gt=0),
    "undesirable_weight": option(
        "weight of undesirable completions; auto: balances the two labels"
    ),
    "value_clip": option("a value learns from returns within this distance; 0: from all", ge=0),
    "value_target": option(
        "gae: A + V, which trusts later values by lam; return: the discounted score alone"
    ),
    "vf": option("weight of the value head's error", ge=0),
}

# The modifiers that methods allow, by the option that enables each.
RATIOS = frozenset({"f_divergence", "ld_alpha"})
MEANS = frozenset({"mean_ratios"})
PAIRS = frozenset({"wpo", "row_weight"})
MARGIN = frozenset({"margin"})
CLAMPS = frozenset({"humanline"})
# Options of the step, which the feed reads and all methods of a mixture share: they choose the KL
# completions over which `z` is a mean.
STEP_OPTIONS = ("kl_per_step", "kl_use")


class Options(BaseModel):
    """Options with checked names, types and bounds."""

    model_config = ConfigDict(**STRICT, frozen=True)


class Pairs:
    """The rows of a micro-batch: c is the chosen completion of each, l the rejected one.

    Each value is (rows,) float64: r = log(policy / reference), lp the log-prob, n the tokens.
    """

    def __init__(self, completions: Completions, step: Step) -> None:
        self.completions, self.step = completions, step
        ratios = completions.ratios
        self.r_c, self.r_l = ratios[0::2], ratios[1::2]
        self.lp_c, self.lp_l = completions.logps[0::2], completions.logps[1::2]
        self.n_c, self.n_l = completions.num_tokens[0::2], completions.num_tokens[1::2]
        self.D = self.r_c - self.r_l
        self.D_mean = self.r_c / self.n_c - self.r_l / self.n_l
        # The log-probs that are compared; modifiers change these, but not those to imitate.
        self.compared_c = completions.compared_logps[0::2]
        self.compared_l = completions.compared_logps[1::2]
        # From the data: the target margin, and the difference of the scores.
        margin = completions.margin
        self.target_margin: Tensor | float = 0.0 if margin is None else margin
        self.score_gap = completions.scores[0::2] - completions.scores[1::2]
        self.index = completions.step_indices[0::2] // 2  # of each row in the whole step

    @property
    def m_c(self) -> Tensor:
        """The mean log-prob per token of the chosen completions."""
        return self.lp_c / self.n_c

    @property
    def m_l(self) -> Tensor:
        """The mean log-prob per token of the rejected completions."""
        return self.lp_l / self.n_l

    def nll(self, scope: Scope) -> Tensor:
        """Each pair's part of the step's mean negative log-likelihood of chosen tokens."""
        if scope == "pair":
            return -self.m_c
        # The objective divides by the step's rows: this leaves a mean over all chosen tokens.
        return -self.lp_c * (self.step.rows / max(1, self.step.chosen_tokens))


class Labelled:
    """Completions with a label each; each value is (completions,)."""

    def __init__(self, completions: Completions, step: Step) -> None:
        self.completions, self.step = completions, step
        self.lp, self.n, self.r = completions.logps, completions.num_tokens, completions.ratios
        self.is_good = is_good(completions)
        self.sign = self.weights(1.0, -1.0)

    @property
    def z(self) -> Tensor:
        """The policy's KL from the reference, estimated on KL completions: ().

        The mean over the whole step is clamped: a mean of clamped parts would be too high.
        """
        return _mean(self.step.mismatched).clamp(min=0)

    def once(self, value: Tensor) -> Mean[Tensor]:
        """A number of the whole step as a metric; over several steps it is weighted as the loss."""
        count = value.new_full((), self.step.completions)
        return Mean(self.completions.once(value.detach() * count), self.completions.once(count))

    def weights(self, desirable: Weight, undesirable: Weight) -> Tensor:
        """The weight of each completion, by its label."""
        assert desirable != "auto", "`auto` is resolved before the first step"
        assert undesirable != "auto", "`auto` is resolved before the first step"
        # Tensors, because torch.where() turns two plain numbers into float32.
        good, bad = self.r.new_full((), desirable), self.r.new_full((), undesirable)
        return torch.where(self.is_good, good, bad)


class Groups:
    """The completions of each prompt with their scores, and their tokens."""

    def __init__(self, completions: Completions, step: Step) -> None:
        self.completions, self.step = completions, step
        self.scores, self.lp, self.n = completions.scores, completions.logps, completions.num_tokens
        self.tokens = tokens_of(completions)
        assert self.tokens.reference is not None, "the method declares the need token_reference"
        # Modifiers change `tokens.log_ratios`, but not these.
        self.plain_ratios = self.tokens.logps - self.tokens.reference


@dataclass(frozen=True)
class Output:
    """Losses to be summed, and metrics; one without a value in the whole step is not reported."""

    losses: Tensor  # (rows,) or (completions,) float64; sums over tokens if items is tokens
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # any number of values each


@dataclass(frozen=True, eq=False)
class Method:
    """One line of the table: a function, its name, its formula and its needs."""

    name: str
    formula: str
    source: str  # its paper or implementation
    function: Callable[..., Tensor | Output]
    rows: RowKind
    items: Items  # the loss is a mean over these
    needs: frozenset[Need]
    modifiers: frozenset[str]  # the options of `Modifiers` that it takes
    rewards: str = ""  # the formula of a completion's reward, one of REWARDS
    head: Head = "none"
    # Values of each completion, (completions,), that a first pass gathers over the whole step.
    gathers: Mapping[str, Callable[[Completions, Any], Tensor]] = field(default_factory=dict)
    keeps_mean: str = ""  # the gathered value whose mean over all steps so far is kept
    # The score of a rejected or undesirable completion whose row has no scores; a good one has 1.
    bad_score: float = 0.0
    # Whether it assumes that the reference generated the data.
    drawn_by_reference: bool = False
    # Text between a prompt and the completions of a role; it is not learned.
    context: Callable[[Any], Mapping[Role, str]] | None = None

    @property
    def use(self) -> str:
        """When to choose it, in a sentence."""
        return inspect.getdoc(self.function) or ""

    @property
    def imitates(self) -> bool:
        """Whether the options of `imitated_too` belong to it."""
        return self.rows == "paired" and "reference" in self.needs

    @cached_property
    def fields(self) -> dict[str, tuple[Any, Any]]:
        """The type, with meaning and bounds, and the default of each option, by its name."""
        more = _keywords(imitated_too) if self.imitates else {}
        return {**_keywords(self.function), **more}

    @cached_property
    def options(self) -> type[Options]:
        """The model that checks its options."""
        fields: dict[str, Any] = self.fields
        return create_model(self.name, __base__=Options, **fields)

    def gathered(self, completions: Completions, options: Any) -> dict[str, Tensor]:
        """The values to gather from these completions."""
        return {name: of(completions, options).detach() for name, of in self.gathers.items()}

    def loss(self, completions: Completions, step: Step, options: Any) -> Output:
        """The losses of a micro-batch, with the terms of its kind of rows; metrics are detached."""
        seen = _SEEN[self.rows](completions, step)
        found = self.function(seen, **_values(options, self.function))
        output = found if isinstance(found, Output) else Output(found)
        losses, metrics = output.losses, dict(output.metrics)
        if isinstance(seen, Pairs) and self.head != "score":
            metrics |= {"logps/chosen": seen.lp_c, "logps/rejected": seen.lp_l}
        if isinstance(seen, Pairs) and self.imitates:
            metrics["nll"] = -seen.m_c
            losses = imitated_too(seen, losses, **_values(options, imitated_too))
        if isinstance(seen, Labelled) and "reference" in self.needs:
            metrics["logps/chosen"] = Mean.of(seen.lp, seen.is_good)
            metrics["logps/rejected"] = Mean.of(seen.lp, ~seen.is_good)
        if isinstance(seen, Labelled) and "mismatched" in self.needs:
            count = len(step.mismatched)
            metrics["kl/pairs"] = seen.once(step.mismatched.new_full((), count))
            if count:
                metrics["kl/raw"] = seen.once(_mean(step.mismatched))
                metrics["kl/clamped"] = seen.once(seen.z)
        metrics = {
            name: one if isinstance(one, Mean) else one.detach() for name, one in metrics.items()
        }
        return Output(losses, metrics)


_SEEN: dict[RowKind, Callable[[Completions, Step], Pairs | Labelled | Groups]] = {
    "paired": Pairs,
    "labelled": Labelled,
    "grouped": Groups,
    "imitated": Labelled,
}


def imitated_too(
    p: Pairs, losses: Tensor, *, sft_weight: float = 0.0, sft_normalize: MeanOrSum = "mean"
) -> Tensor:
    """Losses + sft_weight * nll_c, a mean per token (https://arxiv.org/abs/2404.19733) or a sum."""
    return losses + sft_weight * -(p.m_c if sft_normalize == "mean" else p.lp_c)


METHODS: dict[str, Method] = {}
Function = TypeVar("Function", bound=Callable[..., Any])


def _method(
    formula: str, source: str, *, needs: Any = (), modifiers: Iterable[str] = (), **declared: Any
) -> Callable[[Function], Function]:
    """Adds a function to METHODS under its own name."""
    declared |= {"needs": frozenset(needs), "modifiers": frozenset(modifiers)}

    def add(function: Function) -> Function:
        name = function.__name__
        METHODS[name] = Method(name, formula, source, function, **declared)
        return function

    return add


paired = partial(
    _method,
    rows="paired",
    items="rows",
    needs={"reference"},
    rewards="b r",
    modifiers=RATIOS | PAIRS,
)
labelled = partial(
    _method,
    rows="labelled",
    items="completions",
    needs={"reference"},
    rewards="b r",
    modifiers={"row_weight"},
)
grouped = partial(
    _method,
    rows="grouped",
    items="tokens",
    modifiers=CLAMPS | {"row_weight"},
    drawn_by_reference=True,
)
imitated = partial(_method, rows="imitated", items="chosen_tokens", modifiers={"row_weight"})


def is_good(completions: Completions) -> Tensor:
    """Mask of the chosen and desirable completions, (completions,) bool."""
    return (completions.roles == Role.CHOSEN) | (completions.roles == Role.DESIRABLE)


def tokens_of(completions: Completions) -> Tokens:
    """The tokens of completions."""
    assert completions.tokens is not None, "the method declares its need for tokens"
    return completions.tokens


def _mean(values: Tensor) -> Tensor:
    return values.detach().sum() / max(1, len(values))


@cache
def _keywords(function: Callable[..., Any]) -> Mapping[str, tuple[Any, Any]]:
    """The keyword arguments of a function as fields of a model: type with bounds, and default."""
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for name, one in inspect.signature(function).parameters.items():
        if one.kind is inspect.Parameter.KEYWORD_ONLY:
            kind = hints[name]
            is_explained = get_origin(kind) is Annotated
            found[name] = (kind if is_explained else Annotated[kind, OPTIONS[name]], one.default)
    return found


def _values(options: Any, function: Callable[..., Any]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _keywords(function)}
