"""The loss of a run: one method or several with weights, their options and modifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...schemas.methods import (
    Branches,
    Head,
    Labels,
    Mean,
    Method,
    Metric,
    Need,
    RowKind,
    State,
    Step,
)
from ...schemas.rows import LEAST, PER_TOKEN, Role, rounding_of
from .modifiers import Modifiers, names_within
from .rewards import MARGINS, reward_metrics, row_margins
from .tensors import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

LOSS = "loss"
MethodState = dict[str, tuple[float, ...]]  # of each method that has one, by its name
StepState = Mapping[str, State]  # the same, some of it still on the device of a step
# Paired rows can be read as labelled ones, and both say which branches to imitate.
_MOST_ASKED_FIRST: tuple[RowKind, ...] = ("grouped", "paired", "labelled", "imitated")
_LABELS = {Role.CHOSEN: Role.DESIRABLE, Role.REJECTED: Role.UNDESIRABLE}


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
    loss_sums: Mapping[str, Mean[Tensor]]  # by part: its sum here, and the whole step's count
    metrics: Mapping[str, Metric]
    facts: Mapping[str, Mean[Tensor]]  # step-level scalars, the same in every micro-batch


@dataclass(frozen=True)
class Recipe:
    """The loss of a run: methods with weights and options, and modifiers."""

    parts: tuple[Part, ...]
    modifiers: Modifiers = Modifiers()
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
            return self.parts[0].method.summary
        return " + ".join(f"{part.weight:g} ({part.method.summary})" for part in self.parts)

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
        """The score of a bad branch in a row without scores."""
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
        return any(part.method.pre_pass for part in self.parts)

    @property
    def values(self) -> dict[str, Any]:
        """Its options by their names in a config, and the modifiers in use."""
        several = len(self.parts) > 1
        options = {
            f"{part.method.name}.{one.name}" if several else one.name: getattr(
                part.options, one.name
            )
            for part in self.parts
            for one in dataclasses.fields(part.options)
        }
        return {**options, **self.modifiers.active}

    @property
    def option_names(self) -> frozenset[str]:
        """The names of its options: its methods' own, and the modifiers that all allow."""
        allowed = frozenset.intersection(*(part.method.modifiers for part in self.parts))
        return frozenset(self.values) | names_within(allowed)

    def option(self, name: str, default: Any) -> Any:
        """The option of this name, which is the same in all parts that have it."""
        found = (getattr(part.options, name, None) for part in self.parts)
        return next((value for value in found if value is not None), default)

    def computed_in(self, policy: str, reference: str) -> Recipe:
        """The recipe with the rounding of sums in the dtypes of policy and reference."""
        if self.head == "score":  # one number, and no sum over tokens
            return replace(self, rounding=max(LEAST, PER_TOKEN[policy]))
        dtypes = (policy, reference) if "reference" in self.needs else (policy,)
        return replace(self, rounding=rounding_of(*dtypes))

    def resolve_auto(self, labels: Labels) -> tuple[Recipe, tuple[str, ...]]:
        """The recipe with each `auto` option resolved, and advice to print."""
        resolved = [part.method.resolve_auto(part.options, labels) for part in self.parts]
        parts = tuple(
            replace(part, options=one.options)
            for part, one in zip(self.parts, resolved, strict=True)
        )
        return replace(self, parts=parts), tuple(line for one in resolved for line in one.advice)

    def pre_pass(self, branches: Branches) -> dict[str, Tensor]:
        """The pre-pass values of every branch, (branches,) each, named `method/value`."""
        seen = self.modifiers.applied(branches)
        return {
            f"{part.method.name}/{name}": value
            for part in self.parts
            if part.method.pre_pass
            for name, value in part.method.pre_pass(self._view(seen, part), part.options).items()
        }

    def next_state(self, state: StepState, pre_pass: Mapping[str, Tensor]) -> StepState:
        """The state of each method that has one, updated by this step."""
        return {
            part.method.name: part.method.update_state(
                state.get(part.method.name, ()), _of(part, pre_pass)
            )
            for part in self.parts
            if part.method.update_state
        }

    @property
    def reward_formula(self) -> str:
        """What these rewards are, in the words of the table of methods; empty without any."""
        formulas = (part.method.rewards.formula for part in self.parts if part.method.rewards)
        return next(formulas, "")

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
        """The loss of a micro-batch."""
        given = replace(branches, rounding=self.rounding)
        seen = self.modifiers.applied(given)
        with torch.no_grad():
            less = self.modifiers.applied(given, less=self.rounding)
        outcomes = [self._outcome_of(part, seen, less, step, state) for part in self.parts]
        if len(outcomes) == 1:
            first = outcomes[0]
            return replace(first, metrics={**first.metrics, **self.modifiers.metrics(branches)})
        metrics: dict[str, Metric] = {}
        loss_sums: dict[str, Mean[Tensor]] = {}
        facts: dict[str, Mean[Tensor]] = {}
        for part, outcome in zip(self.parts, outcomes, strict=True):
            loss_sums[f"{LOSS}/{part.method.name}"] = outcome.loss_sums[LOSS]
            metrics, facts = {**outcome.metrics, **metrics}, {**outcome.facts, **facts}
        losses = torch.stack([_by_branch(one.losses, branches) for one in outcomes]).sum(dim=0)
        weighed = [
            part.weight * outcome.loss for part, outcome in zip(self.parts, outcomes, strict=True)
        ]
        loss = torch.stack(weighed).sum()
        metrics |= self.modifiers.metrics(branches)
        return Outcome(loss, losses, loss_sums, metrics, facts)

    def with_loss(self, means: Mapping[str, float]) -> dict[str, float]:
        """The means with the weighted sum of the parts' losses; a part without items adds none."""
        weights = {f"{LOSS}/{part.method.name}": part.weight for part in self.parts}
        present = [name for name in weights if name in means]
        if not present:
            return dict(means)
        return {LOSS: sum(weights[name] * means[name] for name in present), **means}

    def _outcome_of(
        self, part: Part, seen: Branches, less: Branches, step: Step, state: StepState
    ) -> Outcome:
        """The outcome of one part; `less` are the branches with every sum off by rounding."""
        branches, method = self._view(seen, part), part.method
        known = replace(step, pre_pass=_of(part, step.pre_pass), state=state.get(method.name, ()))
        output = method.loss(branches, known, part.options)
        losses = self.modifiers.weighed(output.losses, branches)
        own = Mean(losses.sum(), step.count_of(method.items))
        return Outcome(
            loss=own.value,
            losses=losses.detach(),
            loss_sums={LOSS: replace(own, total=own.total.detach())},
            metrics={**_reward_metrics(part, branches, less, output.metrics), **output.metrics},
            # In a window of several steps a fact is weighted as the loss of its step is.
            facts={name: Mean(fact * own.count, own.count) for name, fact in output.facts.items()},
        )

    def _view(self, branches: Branches, part: Part) -> Branches:
        """The branches as this part reads them: pairs become labels for a method of labels."""
        if part.method.rows != "labelled" or self.rows != "paired":
            return branches
        roles = branches.roles
        for role, label in _LABELS.items():
            roles = roles.masked_fill(roles == role, label)
        return replace(branches, roles=roles)


_ROLES: dict[RowKind, tuple[set[Role], set[Role]]] = {
    "paired": ({Role.CHOSEN}, {Role.REJECTED}),
    "labelled": ({Role.DESIRABLE, Role.UNDESIRABLE},) * 2,
}


def reads(kind: RowKind, roles: NDArray[np.int8]) -> bool:
    """Whether rows of this kind have these roles; of pairs the chosen branch comes first."""
    if kind not in _ROLES or (roles == Role.MISMATCHED).all():
        return True
    sides = zip(_ROLES[kind], (roles[0::2], roles[1::2]), strict=True)
    return all(set(found.tolist()) <= allowed for allowed, found in sides)


def is_good(branches: Branches) -> Tensor:
    """Mask of the chosen and desirable branches, (branches,) bool."""
    return (branches.roles == Role.CHOSEN) | (branches.roles == Role.DESIRABLE)


def _rewards_of(part: Part, branches: Branches) -> Tensor | None:
    rewards = part.method.rewards
    return rewards.of(branches, part.options).detach() if rewards else None


def _reward_metrics(
    part: Part, branches: Branches, less: Branches, own: Mapping[str, Metric]
) -> dict[str, Metric]:
    """The metrics of a part's rewards; margins that its loss reports itself are kept."""
    rewards, others = _rewards_of(part, branches), _rewards_of(part, less)
    if rewards is None or others is None:
        return {}
    rounding, margins = (rewards - others).abs(), own.get(MARGINS)
    assert not isinstance(margins, Mean), "every pair has a margin"
    return reward_metrics(rewards, rounding, branches, part.method.rows, margins)


def _of(part: Part, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of this part among those named `method/value`."""
    prefix = f"{part.method.name}/"
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }


def _by_branch(losses: Tensor, branches: Branches) -> Tensor:
    """Losses by branch, (branches,): a loss of a row is repeated for its branches."""
    return losses if len(losses) == len(branches.rows) else losses[branches.rows]
