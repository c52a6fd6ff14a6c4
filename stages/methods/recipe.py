"""The loss of a run: one method or several with weights, their options and modifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...schemas.methods import Branches, Head, Labels, Mean, Metric, Need, RowKind, Step
from ...schemas.rows import LEAST, PER_TOKEN, Role, rounding_of
from .method import Method, is_good
from .metrics import MARGINS, REWARDS, reward_metrics, row_margins
from .modifiers import Modifiers, names_within
from .tensors import Tensor, torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LOSS = "loss"
MethodState = dict[str, tuple[float, ...]]  # of each method that has one, by its name
# The same, some of it still on the device of a step.
StepState = Mapping[str, "tuple[float | Tensor, ...]"]
# Paired rows can be read as labelled ones, and both say which completions to imitate.
_MOST_ASKED_FIRST: tuple[RowKind, ...] = ("grouped", "paired", "labelled", "imitated")
_LABELS = {Role.CHOSEN: Role.DESIRABLE, Role.REJECTED: Role.UNDESIRABLE}
# Of wD nD / (wU nU), https://arxiv.org/abs/2402.01306.
LOWEST, HIGHEST = 1.0, 1.5


@dataclass(frozen=True)
class Part:
    """One method with its options and its weight."""

    method: Method
    options: Any
    weight: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """The loss and metrics that one micro-batch adds to a step."""

    loss: Tensor  # () this micro-batch's part of the step's mean, with the gradient
    losses: Tensor  # (rows,) or (branches,): where one is not finite, the row is to blame
    metrics: Mapping[str, Metric]  # the loss among them; of a mixture that of each part


@dataclass(frozen=True)
class Recipe:
    """The loss of a run: methods with weights and options, and modifiers."""

    parts: tuple[Part, ...]
    modifiers: Modifiers = field(default_factory=Modifiers)
    rounding: float = LEAST  # see `Branches`

    @property
    def name(self) -> str:
        """The value of --method that names it."""
        if len(self.parts) == 1:
            return self.parts[0].method.name
        return "+".join(f"{part.method.name}:{part.weight:g}" for part in self.parts)

    @property
    def formula(self) -> str:
        """The formula of its loss."""
        if len(self.parts) == 1:
            return self.parts[0].method.formula
        return " + ".join(f"{part.weight:g} ({part.method.formula})" for part in self.parts)

    @property
    def rows(self) -> RowKind:
        """The kind of rows that all of its parts can read."""
        kinds = {part.method.rows for part in self.parts}
        return next(kind for kind in _MOST_ASKED_FIRST if kind in kinds)

    @property
    def head(self) -> Head:
        """The policy's head in addition to, or instead of, its vocabulary."""
        return self.parts[0].method.head

    @property
    def bad_score(self) -> float:
        """The score of a bad completion in a row without scores."""
        return self.parts[0].method.bad_score

    @property
    def drawn_by_reference(self) -> bool:
        """Whether a part takes the reference for the policy that generated the data."""
        return any(part.method.drawn_by_reference for part in self.parts)

    @property
    def needs(self) -> frozenset[Need]:
        """Everything its parts and modifiers need."""
        needs = self.modifiers.needs.union(*(part.method.needs for part in self.parts))
        # Where no part has a reference, a modifier changes the policy's own log-probs.
        return needs if "reference" in needs else needs - {"token_reference"}

    @property
    def has_pre_pass(self) -> bool:
        """Whether a loss needs values of the whole step first."""
        return any(part.method.gathers for part in self.parts)

    @property
    def values(self) -> dict[str, Any]:
        """Its options by their names in a config, and the modifiers in use."""
        several = len(self.parts) > 1
        options = {
            f"{part.method.name}.{name}" if several else name: value
            for part in self.parts
            for name, value in part.options
        }
        return {**options, **self.modifiers.active}

    @property
    def option_names(self) -> frozenset[str]:
        """The names of its options: its methods' own, and the modifiers that all allow."""
        allowed = frozenset.intersection(*(part.method.modifiers for part in self.parts))
        return frozenset(self.values) | names_within(allowed)

    @property
    def reward_formula(self) -> str:
        """What its rewards are, in the words of REWARDS; empty without any."""
        return next((part.method.rewards for part in self.parts if part.method.rewards), "")

    def option(self, name: str, default: Any) -> Any:
        """The option of this name, which is the same in all parts that have it."""
        return next(
            (getattr(part.options, name) for part in self.parts if name in part.method.fields),
            default,
        )

    def computed_in(self, policy: str, reference: str) -> Recipe:
        """The recipe with the rounding of sums in the dtypes of policy and reference."""
        if self.head == "score":  # one number, and no sum over tokens
            return replace(self, rounding=max(LEAST, PER_TOKEN[policy]))
        dtypes = (policy, reference) if "reference" in self.needs else (policy,)
        return replace(self, rounding=rounding_of(*dtypes))

    def resolve_auto(self, labels: Labels) -> tuple[Recipe, tuple[str, ...]]:
        """The recipe with each `auto` weight of a label resolved, and advice to print."""
        parts, advice = list[Part](), list[str]()
        for part in self.parts:
            options = part.options
            if "desirable_weight" in part.method.fields:
                options, line = resolve_weights(options, labels)
                advice.append(line)
            parts.append(replace(part, options=options))
        return replace(self, parts=tuple(parts)), tuple(filter(None, advice))

    def pre_pass(self, branches: Branches) -> dict[str, Tensor]:
        """The values to be gathered of each completion, (branches,) each, named `method/value`."""
        seen = self.modifiers.applied(branches)
        return {
            f"{part.method.name}/{name}": value
            for part in self.parts
            for name, value in part.method.gathered(self._view(seen, part), part.options).items()
        }

    def next_state(self, state: StepState, pre_pass: Mapping[str, Tensor]) -> StepState:
        """Of each method that keeps a mean: the count and the mean, this step included."""
        after: dict[str, tuple[float | Tensor, ...]] = {}
        for name, kept in ((part.method.name, part.method.keeps_mean) for part in self.parts):
            if kept:
                values = pre_pass[f"{name}/{kept}"]
                known, mean = state.get(name) or (0.0, 0.0)
                count = float(known) + len(values)
                # Differences first: sums of many steps would lose the last digits of a mean near 0.
                after[name] = (count, mean + (values - mean).sum() / max(1.0, count))
        return after

    def rewards(self, branches: Branches, *, less: float = 0.0) -> Tensor | None:
        """The rewards of the first part that has any, (branches,); no gradient.

        `less` is subtracted from each sum of log-probs.
        """
        seen = self.modifiers.applied(branches, less=less)
        found = (_rewards_of(part, self._view(seen, part)) for part in self.parts)
        return next((rewards for rewards in found if rewards is not None), None)

    def margins(self, branches: Branches) -> tuple[Tensor, Tensor]:
        """The margin of each row's rewards and its rounding, as `row_margins` has them.

        No gradient: rewards have none.
        """
        rewards, less = self.rewards(branches), self.rewards(branches, less=self.rounding)
        assert rewards is not None, "a recipe without rewards is refused"
        assert less is not None
        return row_margins(rewards, (rewards - less).abs(), branches.rows, is_good(branches))

    def ratios(self, branches: Branches) -> Tensor:
        """Log-ratios, as modifiers have left them."""
        return self.modifiers.applied(branches).ratios

    def outcome(self, branches: Branches, step: Step, state: StepState) -> Outcome:
        """The loss of a micro-batch, and what it adds to everything that is reported."""
        given = replace(branches, rounding=self.rounding)
        seen = self.modifiers.applied(given)
        with torch.no_grad():
            less = self.modifiers.applied(given, less=self.rounding)
        parts_of_loss = list[Tensor]()
        losses = list[Tensor]()
        metrics = dict[str, Metric]()
        for part in self.parts:
            method, completions = part.method, self._view(seen, part)
            gathered = {name: step.pre_pass[f"{method.name}/{name}"] for name in method.gathers}
            known = replace(step, pre_pass=gathered, state=state.get(method.name, ()))
            output = method.loss(completions, known, part.options)
            own = self.modifiers.weighed(output.losses, completions)
            total, count = own.sum(), step.count_of(method.items)
            parts_of_loss.append(total / (count or 1))
            losses.append(own.detach())
            loss = Mean(total.detach(), branches.once(total.new_full((), count)))
            reported: dict[str, Metric] = {self._loss_name(part): loss, **output.metrics}
            rewards, others = _rewards_of(part, completions), _rewards_of(part, less)
            if rewards is not None and others is not None:
                margins, rounding = reported.get(MARGINS), (rewards - others).abs()
                assert not isinstance(margins, Mean), "every pair has a margin"
                # Margins that the loss reports itself are kept.
                of_rewards = reward_metrics(rewards, rounding, completions, method.rows, margins)
                reported = of_rewards | reported
            metrics = reported | metrics  # what several parts report is named by the first
        metrics |= self.modifiers.metrics(branches)
        if len(self.parts) == 1:
            return Outcome(parts_of_loss[0], losses[0], metrics)
        weighted = [part.weight * one for part, one in zip(self.parts, parts_of_loss, strict=True)]
        # A loss of a row is repeated for its completions.
        per_branch = [
            one if len(one) == len(branches.rows) else one[branches.rows] for one in losses
        ]
        return Outcome(torch.stack(weighted).sum(), torch.stack(per_branch).sum(dim=0), metrics)

    def reported(self, sums: Mapping[str, Mean[float]]) -> dict[str, float]:
        """The means of a step or of several, and the values derived from them.

        Derived are the weighted loss of a mixture, to which a part without items adds nothing, and
        the margin of labels.
        """
        means = {name: one.value for name, one in sums.items()}
        weights = {self._loss_name(part): part.weight for part in self.parts}
        if LOSS not in weights and (present := [name for name in weights if name in means]):
            means = {LOSS: sum(weights[name] * means[name] for name in present), **means}
        chosen, rejected = means.get("rewards/chosen"), means.get("rewards/rejected")
        if MARGINS not in means and chosen is not None and rejected is not None:
            means[MARGINS] = chosen - rejected
        return means

    def _loss_name(self, part: Part) -> str:
        return LOSS if len(self.parts) == 1 else f"{LOSS}/{part.method.name}"

    def _view(self, branches: Branches, part: Part) -> Branches:
        """The completions as this part reads them: pairs become labels for a method of labels."""
        if part.method.rows != "labelled" or self.rows != "paired":
            return branches
        roles = branches.roles
        for role, label in _LABELS.items():
            roles = roles.masked_fill(roles == role, label)
        return replace(branches, roles=roles)


def _rewards_of(part: Part, branches: Branches) -> Tensor | None:
    formula = part.method.rewards
    return REWARDS[formula](branches, part.options).detach() if formula else None


def reads(kind: RowKind, roles: NDArray[np.int8]) -> bool:
    """Whether rows of this kind have these roles; of pairs the chosen completion comes first."""
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
        advice = f"All training rows are {only}: a contrast cannot be learned from them."
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
                f"Desirable completions weigh {ratio:.3g} times as much as undesirable ones in "
                f"all ({labels.desirable:,} x {desirable:g} to {labels.undesirable:,} x "
                f"{undesirable:g}); KTO wants {LOWEST:g} to {HIGHEST:g}. Set "
                f"method.desirable_weight between {low:.4g} and {high:.4g}, or both to auto."
            )
    weights = {"desirable_weight": desirable, "undesirable_weight": undesirable}
    return options.model_copy(update=weights), advice
