"""The loss of a run: one or more methods with weights, options and modifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...schemas.methods import Completions, Head, Labels, Mean, Metric, Need, RowKind, Step
from ...schemas.rows import LEAST, PER_TOKEN, Role, rounding_of
from .method import Method, is_good
from .metrics import MARGINS, REWARDS, reward_metrics, row_margins
from .modifiers import Modifiers, names_within
from .tensors import Tensor, torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LOSS = "loss"
MethodState = dict[str, tuple[float, ...]]  # by the name of each method with a state
# The same, partly still on the device.
StepState = Mapping[str, "tuple[float | Tensor, ...]"]
# Paired rows can be read as labelled ones, and both can be imitated.
_MOST_ASKED_FIRST: tuple[RowKind, ...] = ("grouped", "paired", "labelled", "imitated")
_LABELS = {Role.CHOSEN: Role.DESIRABLE, Role.REJECTED: Role.UNDESIRABLE}
# Of wD nD / (wU nU), https://arxiv.org/abs/2402.01306.
LOWEST, HIGHEST = 1.0, 1.5


@dataclass(frozen=True)
class Term:
    """One method with its options and its weight."""

    method: Method
    options: Any
    weight: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """The loss and metrics that one micro-batch adds to a step."""

    loss: Tensor  # () this micro-batch's part of the step's mean, with the gradient
    losses: Tensor  # (rows,) or (completions,), to find rows that are not finite
    metrics: Mapping[str, Metric]  # with the loss; for a mixture, the loss of each term


@dataclass(frozen=True)
class Objective:
    """The loss of a run: methods with weights and options, and modifiers."""

    terms: tuple[Term, ...]
    modifiers: Modifiers = field(default_factory=Modifiers)
    rounding: float = LEAST  # see `Completions`

    @property
    def name(self) -> str:
        """The value of --method for this objective."""
        if len(self.terms) == 1:
            return self.terms[0].method.name
        return "+".join(f"{term.method.name}:{term.weight:g}" for term in self.terms)

    @property
    def formula(self) -> str:
        """The formula of its loss."""
        if len(self.terms) == 1:
            return self.terms[0].method.formula
        return " + ".join(f"{term.weight:g} ({term.method.formula})" for term in self.terms)

    @property
    def rows(self) -> RowKind:
        """The kind of rows that all of its terms can read."""
        kinds = {term.method.rows for term in self.terms}
        return next(kind for kind in _MOST_ASKED_FIRST if kind in kinds)

    @property
    def head(self) -> Head:
        """The policy's head beside, or instead of, its vocabulary's."""
        return self.terms[0].method.head

    @property
    def bad_score(self) -> float:
        """The score of a bad completion in a row without scores."""
        return self.terms[0].method.bad_score

    @property
    def drawn_by_reference(self) -> bool:
        """Whether a term assumes that the reference generated the data."""
        return any(term.method.drawn_by_reference for term in self.terms)

    @property
    def needs(self) -> frozenset[Need]:
        """Everything its terms and modifiers need."""
        needs = self.modifiers.needs.union(*(term.method.needs for term in self.terms))
        # If no term has a reference, a modifier changes the policy's own log-probs.
        return needs if "reference" in needs else needs - {"token_reference"}

    @property
    def has_pre_pass(self) -> bool:
        """Whether a loss needs values of the whole step first."""
        return any(term.method.gathers for term in self.terms)

    @property
    def values(self) -> dict[str, Any]:
        """Its options by their names in a config, and the modifiers in use."""
        several = len(self.terms) > 1
        options = {
            f"{term.method.name}.{name}" if several else name: value
            for term in self.terms
            for name, value in term.options
        }
        return {**options, **self.modifiers.active}

    @property
    def option_names(self) -> frozenset[str]:
        """The names of its options: its methods' own, and the modifiers that all allow."""
        allowed = frozenset.intersection(*(term.method.modifiers for term in self.terms))
        return frozenset(self.values) | names_within(allowed)

    @property
    def reward_formula(self) -> str:
        """The formula of its rewards, a key of REWARDS; empty without rewards."""
        return next((term.method.rewards for term in self.terms if term.method.rewards), "")

    def option(self, name: str, default: Any) -> Any:
        """The option of this name, which is equal in all terms that have it."""
        return next(
            (getattr(term.options, name) for term in self.terms if name in term.method.fields),
            default,
        )

    def computed_in(self, policy: str, reference: str) -> Objective:
        """The objective with the rounding of sums in the dtypes of policy and reference."""
        if self.head == "score":  # one number instead of a sum over tokens
            return replace(self, rounding=max(LEAST, PER_TOKEN[policy]))
        dtypes = (policy, reference) if "reference" in self.needs else (policy,)
        return replace(self, rounding=rounding_of(*dtypes))

    def resolve_auto(self, labels: Labels) -> tuple[Objective, tuple[str, ...]]:
        """The objective with each `auto` weight of a label resolved, and advice for the log."""
        terms, advice = list[Term](), list[str]()
        for term in self.terms:
            options = term.options
            if "desirable_weight" in term.method.fields:
                options, line = resolve_weights(options, labels)
                advice.append(line)
            terms.append(replace(term, options=options))
        return replace(self, terms=tuple(terms)), tuple(filter(None, advice))

    def pre_pass(self, completions: Completions) -> dict[str, Tensor]:
        """The values to gather, (completions,) each, named `method/value`."""
        seen = self.modifiers.applied(completions)
        return {
            f"{term.method.name}/{name}": value
            for term in self.terms
            for name, value in term.method.gathered(self._view(seen, term), term.options).items()
        }

    def next_state(self, state: StepState, pre_pass: Mapping[str, Tensor]) -> StepState:
        """The count and the mean, with this step, of each method that keeps a mean."""
        after: dict[str, tuple[float | Tensor, ...]] = {}
        for name, kept in ((term.method.name, term.method.keeps_mean) for term in self.terms):
            if kept:
                values = pre_pass[f"{name}/{kept}"]
                known, mean = state.get(name) or (0.0, 0.0)
                count = float(known) + len(values)
                # By differences, because a sum over many steps loses the last digits of the mean.
                after[name] = (count, mean + (values - mean).sum() / max(1.0, count))
        return after

    def rewards(self, completions: Completions, *, less: float = 0.0) -> Tensor | None:
        """The rewards of the first term with rewards, (completions,); no gradient.

        `less` is subtracted from each sum of log-probs.
        """
        seen = self.modifiers.applied(completions, less=less)
        found = (_rewards_of(term, self._view(seen, term)) for term in self.terms)
        return next((rewards for rewards in found if rewards is not None), None)

    def margins(self, completions: Completions) -> tuple[Tensor, Tensor]:
        """The margin of each row's rewards and its rounding, by `row_margins`; no gradient."""
        rewards, less = self.rewards(completions), self.rewards(completions, less=self.rounding)
        assert rewards is not None, "an objective without rewards is refused"
        assert less is not None
        return row_margins(rewards, (rewards - less).abs(), completions.rows, is_good(completions))

    def ratios(self, completions: Completions) -> Tensor:
        """The log-ratios after modifiers."""
        return self.modifiers.applied(completions).ratios

    def outcome(self, completions: Completions, step: Step, state: StepState) -> Outcome:
        """The loss and metrics of a micro-batch."""
        given = replace(completions, rounding=self.rounding)
        seen = self.modifiers.applied(given)
        with torch.no_grad():
            less = self.modifiers.applied(given, less=self.rounding)
        losses_of_terms = list[Tensor]()
        losses = list[Tensor]()
        metrics = dict[str, Metric]()
        for term in self.terms:
            method, viewed = term.method, self._view(seen, term)
            gathered = {name: step.pre_pass[f"{method.name}/{name}"] for name in method.gathers}
            known = replace(step, pre_pass=gathered, state=state.get(method.name, ()))
            output = method.loss(viewed, known, term.options)
            own = self.modifiers.weighed(output.losses, viewed)
            total, count = own.sum(), step.count_of(method.items)
            losses_of_terms.append(total / (count or 1))
            losses.append(own.detach())
            loss = Mean(total.detach(), completions.once(total.new_full((), count)))
            reported: dict[str, Metric] = {self._loss_name(term): loss, **output.metrics}
            rewards, others = _rewards_of(term, viewed), _rewards_of(term, less)
            if rewards is not None and others is not None:
                margins, rounding = reported.get(MARGINS), (rewards - others).abs()
                assert not isinstance(margins, Mean), "every pair has a margin"
                # Margins that the loss reports itself take precedence.
                of_rewards = reward_metrics(rewards, rounding, viewed, method.rows, margins)
                reported = of_rewards | reported
            metrics = reported | metrics  # the first term's metrics take precedence
        metrics |= self.modifiers.metrics(completions)
        if len(self.terms) == 1:
            return Outcome(losses_of_terms[0], losses[0], metrics)
        weighted = [
            term.weight * one for term, one in zip(self.terms, losses_of_terms, strict=True)
        ]
        # A row's loss is repeated for its completions.
        per_completion = [
            one if len(one) == len(completions.rows) else one[completions.rows] for one in losses
        ]
        return Outcome(torch.stack(weighted).sum(), torch.stack(per_completion).sum(dim=0), metrics)

    def reported(self, sums: Mapping[str, Mean[float]]) -> dict[str, float]:
        """The means of a step or of several, and the values derived from them.

        Derived are the weighted loss of a mixture, where a term without items adds 0, and the
        margin of labels.
        """
        means = {name: one.value for name, one in sums.items()}
        weights = {self._loss_name(term): term.weight for term in self.terms}
        if LOSS not in weights and (present := [name for name in weights if name in means]):
            means = {LOSS: sum(weights[name] * means[name] for name in present), **means}
        chosen, rejected = means.get("rewards/chosen"), means.get("rewards/rejected")
        if MARGINS not in means and chosen is not None and rejected is not None:
            means[MARGINS] = chosen - rejected
        return means

    def _loss_name(self, term: Term) -> str:
        return LOSS if len(self.terms) == 1 else f"{LOSS}/{term.method.name}"

    def _view(self, completions: Completions, term: Term) -> Completions:
        """The completions as this term reads them: pairs become labels for a method of labels."""
        if term.method.rows != "labelled" or self.rows != "paired":
            return completions
        roles = completions.roles
        for role, label in _LABELS.items():
            roles = roles.masked_fill(roles == role, label)
        return replace(completions, roles=roles)


def _rewards_of(term: Term, completions: Completions) -> Tensor | None:
    formula = term.method.rewards
    return REWARDS[formula](completions, term.options).detach() if formula else None


def reads(kind: RowKind, roles: NDArray[np.int8]) -> bool:
    """Whether rows of this kind have these roles; a pair's chosen completion comes first."""
    if (roles == Role.MISMATCHED).all():
        return True
    if kind == "paired":
        return bool((roles[0::2] == Role.CHOSEN).all() and (roles[1::2] == Role.REJECTED).all())
    labels = (roles == Role.DESIRABLE) | (roles == Role.UNDESIRABLE)
    return kind != "labelled" or bool(labels.all())


def resolve_weights(options: Any, labels: Labels) -> tuple[Any, str]:
    """The options with `auto` weights resolved, and advice if a label weighs too little.

    `auto` makes wD nD = wU nU; with both free, the larger class weighs 1.
    """
    desirable, undesirable, advice = options.desirable_weight, options.undesirable_weight, ""
    if not (labels.desirable and labels.undesirable):
        desirable, undesirable = (1.0 if one == "auto" else one for one in (desirable, undesirable))
        only = "desirable" if labels.desirable else "undesirable"
        advice = f"All training rows are {only}: add rows with the other label."
    else:
        if desirable == undesirable == "auto":
            larger = max(labels.desirable, labels.undesirable)
            desirable, undesirable = larger / labels.desirable, larger / labels.undesirable
        elif desirable == "auto":
            desirable = undesirable * labels.undesirable / labels.desirable
        elif undesirable == "auto":
            undesirable = desirable * labels.desirable / labels.undesirable
        ratio = (desirable * labels.desirable) / (undesirable * labels.undesirable)
        if not LOWEST - 1e-9 <= ratio <= HIGHEST + 1e-9:
            low, high = desirable * LOWEST / ratio, desirable * HIGHEST / ratio
            advice = (
                f"Desirable completions together weigh {ratio:.3g} times as much as undesirable "
                f"ones ({labels.desirable:,} x {desirable:g} to {labels.undesirable:,} x "
                f"{undesirable:g}); KTO recommends {LOWEST:g} to {HIGHEST:g}. Set "
                f"method.desirable_weight between {low:.4g} and {high:.4g}, or both to auto."
            )
    weights = {"desirable_weight": desirable, "undesirable_weight": undesirable}
    return options.model_copy(update=weights), advice
