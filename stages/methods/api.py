"""`align.losses`: the methods' losses as functions of tensors, `losses.dpo(chosen_logps, …)`.

Every method that needs only one log-prob per completion (for a reward model, one score) has a
function; `dir()` lists them and `help()` documents their arguments. They call the same loss as
`align train`, in float64 and with its gradient, and return one loss per pair or per completion.
Values of a whole step (the KL term of kto, the mean reward of bco, the order of aot) are computed
from the tensors of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor

from ...schemas.errors import UsageError
from ...schemas.methods import Completions, Labels, Step
from ...schemas.rows import Role
from .method import STEP_OPTIONS, Method, is_good
from .objective import Objective, Term
from .table import METHODS, options_of

KL = ("kl_logps", "reference_kl_logps")
# Methods of scored groups read single tokens, not only sums.
_NAMES = tuple(name for name, method in METHODS.items() if method.rows != "grouped")


def __getattr__(name: str) -> Callable[..., Tensor]:
    if name not in _NAMES:
        raise AttributeError(f"align.losses has no {name!r}. It has: {', '.join(_NAMES)}.")
    return _function(METHODS[name])


def __dir__() -> list[str]:
    return list(_NAMES)


@cache
def _function(method: Method) -> Callable[..., Tensor]:
    """The loss as a function of the tensors that the method reads, with its options as keywords."""
    tensors, lengths = _tensors(method), _sides(method, "num_tokens")
    # Options of the step or of the prompts do not change the loss function.
    fields = {} if method.context else method.fields
    defaults = {name: one for name, (_, one) in fields.items() if name not in STEP_OPTIONS}
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in tensors]
    for name, default in {**dict.fromkeys(lengths), **defaults}.items():
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))
    signature = Signature(parameters, return_annotation=Tensor)

    def loss(*given: Any, **named: Any) -> Tensor:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        values = bound.arguments
        options = options_of(method, {name: values[name] for name in defaults})
        missing = [name for name in lengths if values[name] is None]
        if missing and _reads_lengths(method, options):
            raise UsageError(
                f"losses.{method.name} divides by lengths. Pass {' and '.join(missing)}."
            )
        read = {name: values[name] for name in (*tensors, *lengths) if values[name] is not None}
        return _losses(method, options, _float64(method, read))

    required = ", required" if _reads_lengths(method, options_of(method, {})) else ""
    meanings = {
        "labels": "true where a completion is desirable",
        "kl_logps": "the policy's log-probs of KL completions, each after another one's prompt",
        **dict.fromkeys(lengths, f"completion tokens of each{required}"),
        **{name: method.options.model_fields[name].description for name in defaults},
    }
    listed = [f"    {name}: {meanings[name]}" for name in signature.parameters if name in meanings]
    one_per = "pair" if method.items == "rows" else "completion"
    head = [f"{method.formula}, one loss per {one_per}.", "", f"{method.source}.", "", *listed]
    loss.__name__ = loss.__qualname__ = method.name
    loss.__doc__ = "\n".join(head).rstrip()
    loss.__signature__ = signature  # type: ignore[attr-defined]
    return loss


def _tensors(method: Method) -> list[str]:
    """The names of the tensors that a method reads, in the order of the arguments."""
    value = "scores" if method.head == "score" else "logps"
    own = _sides(method, value)
    return [
        *own,
        *(["labels"] if method.rows == "labelled" else []),
        *(f"reference_{name}" for name in own if "reference" in method.needs),
        *(KL if "mismatched" in method.needs else []),
        *(_sides(method, "scores") if "scores" in method.needs else []),
    ]


def _sides(method: Method, name: str) -> tuple[str, ...]:
    return (f"chosen_{name}", f"rejected_{name}") if method.rows == "paired" else (name,)


def _float64(method: Method, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors in float64, all of one length except those of the KL term.

    Values that are not tensors are copied, because a frame's column is read-only.
    """
    tensors = {
        name: (values if isinstance(values, Tensor) else torch.tensor(values)).to(torch.float64)
        for name, values in given.items()
    }
    for of_kl in (False, True):
        found = {name: one.shape for name, one in tensors.items() if (name in KL) == of_kl}
        if len(set(found.values())) > 1 or any(len(shape) != 1 for shape in found.values()):
            listed = ", ".join(f"{name} {list(shape)}" for name, shape in found.items())
            raise UsageError(
                f"losses.{method.name} takes tensors of one dimension and one length, not {listed}."
            )
    return tensors


def _losses(method: Method, options: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """The losses of these completions, as the first step of a run."""
    completions = _completions(method, tensors)
    good = is_good(completions)
    labels = Labels(int(good.sum()), int((~good).sum()))
    objective, _ = Objective((Term(method, options),)).resolve_auto(labels)
    options, pre_pass = objective.terms[0].options, objective.pre_pass(completions)
    mismatched = completions.logps.new_empty(0)
    if "mismatched" in method.needs:
        policy, reference = (tensors[name].detach() for name in KL)
        mismatched = policy - reference
    step = Step(
        rows=len(completions.logps) // len(_sides(method, "")),
        completions=len(completions.logps),
        tokens=int(completions.num_tokens.sum()),
        chosen_tokens=int(completions.num_tokens[good].sum()),
        mismatched=mismatched,
        pre_pass={name.removeprefix(f"{method.name}/"): one for name, one in pre_pass.items()},
        state=objective.next_state({}, pre_pass).get(method.name, ()),
    )
    return method.loss(completions, step, options).losses


def _completions(method: Method, tensors: Mapping[str, Tensor]) -> Completions:
    """All completions of the call in the trainer's order; the chosen one of a pair comes first."""
    value, sides = "scores" if method.head == "score" else "logps", len(_sides(method, ""))

    def woven(name: str, otherwise: float, prefix: str = "") -> Tensor:
        given = [tensors.get(f"{prefix}{side}") for side in _sides(method, name)]
        present = [one for one in given if one is not None]
        if len(present) < sides:
            return torch.full_like(logps, otherwise)
        return torch.stack(present, dim=1).flatten()

    logps = torch.stack([tensors[name] for name in _sides(method, value)], dim=1).flatten()
    index = torch.arange(len(logps), device=logps.device)
    if method.rows == "labelled":
        roles = torch.where(tensors["labels"] > 0, int(Role.DESIRABLE), int(Role.UNDESIRABLE))
    else:
        roles = torch.full_like(index, int(Role.CHOSEN))
        if method.rows == "paired":
            roles[1::2] = int(Role.REJECTED)
    return Completions(
        logps=logps,
        reference=woven(value, 0.0, "reference_").detach(),
        num_tokens=woven("num_tokens", 1.0),
        roles=roles.to(torch.int8),
        scores=woven("scores", torch.nan),
        rows=index // sides,
        step_indices=index,
    )


@cache
def _reads_lengths(method: Method, options: Any) -> bool:
    """Whether the loss depends on the lengths of completions, tested with two lengths."""
    tensors = {
        name: torch.tensor([-3.0, -7.0], dtype=torch.float64) - index**2
        for index, name in enumerate(_tensors(method))
    }
    if method.rows == "labelled":
        tensors["labels"] = torch.tensor([1.0, 0.0])
    losses = []
    for longer in (0, 1):  # the second side of a pair grows more than the first
        sides = enumerate(_sides(method, "num_tokens"), start=1)
        lengths = {name: torch.full((2,), 1.0 + longer * side) for side, name in sides}
        losses.append(_losses(method, options, {**tensors, **lengths}))
    return not torch.equal(*losses)
