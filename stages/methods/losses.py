"""The methods' losses as functions of tensors: `losses.dpo(chosen_logps, …, beta=0.1)`.

There is one function per method that needs only a log-prob (of a reward model: a score) of each
completion; `dir()` lists them and `help()` documents their arguments. They call the same loss as
`align train`, in float64 and with its gradient, and return one loss per pair, or one per
completion. Values of a whole step (the KL term of kto, the mean reward of bco, the order of aot)
are computed from the tensors of the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import Parameter, Signature
from typing import Any, Protocol

import torch
from torch import Tensor

from ...schemas.errors import UsageError
from ...schemas.methods import Branches, Labels, Method, Step
from ...schemas.rows import Role
from .recipe import is_good
from .table import METHODS, STEP_OPTIONS, options_of

LENGTHS = "num_tokens"
KL = ("kl_logps", "reference_kl_logps")


class LossFunction(Protocol):
    """The loss of one method, on one-dimensional tensors, with the options of the table."""

    def __call__(self, *tensors: Any, **named: Any) -> Tensor:
        """One float64 loss per pair, or one per completion."""
        ...


def __getattr__(name: str) -> LossFunction:
    if name not in _NAMES:
        raise AttributeError(f"align.losses has no {name!r}. It has: {', '.join(_NAMES)}.")
    return _function(METHODS[name])


def __dir__() -> list[str]:
    return list(_NAMES)


# Methods of scored groups look at single tokens, and not at sums alone.
_NAMES = tuple(name for name, method in METHODS.items() if method.rows != "grouped")


@cache
def _function(method: Method) -> LossFunction:
    signature = _signature(method)

    def loss(*tensors: Any, **named: Any) -> Tensor:
        given = signature.bind(*tensors, **named)
        given.apply_defaults()
        return _losses(method, given.arguments)

    loss.__name__ = loss.__qualname__ = method.name
    loss.__doc__ = _explained(method, signature)
    loss.__signature__ = signature  # type: ignore[attr-defined]
    return loss


def _signature(method: Method) -> Signature:
    """The signature: the tensors that the method reads, then its options by keyword."""
    needed = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in _tensors(method)]
    lengths = [_keyword(name, None) for name in _sides(method, LENGTHS)]
    options = [_keyword(field.name, field.default) for field in _option_fields(method)]
    return Signature([*needed, *lengths, *options], return_annotation=Tensor)


def _keyword(name: str, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default)


def _tensors(method: Method) -> Iterator[str]:
    value = "scores" if method.head == "score" else "logps"
    yield from _sides(method, value)
    if method.rows == "labelled":
        yield "labels"
    if "reference" in method.needs:
        yield from (f"reference_{name}" for name in _sides(method, value))
    if "mismatched" in method.needs:
        yield from KL
    if "scores" in method.needs:
        yield from _sides(method, "scores")


def _sides(method: Method, name: str) -> tuple[str, ...]:
    return (f"chosen_{name}", f"rejected_{name}") if method.rows == "paired" else (name,)


def _option_fields(method: Method) -> list[dataclasses.Field[Any]]:
    """The options that the loss itself reads; others change the step or the prompts."""
    if method.context:
        return []
    return [field for field in dataclasses.fields(method.options) if field.name not in STEP_OPTIONS]


def _explained(method: Method, signature: Signature) -> str:
    meanings = {
        "labels": "true where a completion is desirable",
        "kl_logps": "the policy's, of mismatched completions: prompts with another one's answer",
    }
    meanings |= dict.fromkeys(_sides(method, LENGTHS), "completion tokens of each")
    if _reads_lengths(method, options_of(method, {})):
        meanings |= dict.fromkeys(_sides(method, LENGTHS), "completion tokens of each, required")
    meanings |= {field.name: field.metadata["description"] for field in _option_fields(method)}
    listed = [f"    {name}: {meanings[name]}" for name in signature.parameters if name in meanings]
    items = "pair" if method.items == "rows" else "completion"
    lines = [f"{method.summary}, one loss per {items}.", "", f"{method.source}.", "", *listed]
    return "\n".join(lines).rstrip()


def _losses(method: Method, given: Mapping[str, Any]) -> Tensor:
    options = options_of(
        method, {field.name: given[field.name] for field in _option_fields(method)}
    )
    lengths = _sides(method, LENGTHS)
    missing = [name for name in lengths if given[name] is None]
    if missing and _reads_lengths(method, options):
        raise UsageError(f"losses.{method.name} divides by lengths. Pass {' and '.join(missing)}.")
    tensors = _read(method, given)
    if method.rows == "labelled":
        good = int((tensors["labels"] > 0).sum())
        labels = Labels(good, len(tensors["labels"]) - good)
        options = method.resolve_auto(options, labels).options
    return _computed(method, options, tensors)


def _computed(method: Method, options: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    branches = _branches(method, tensors)
    return method.loss(branches, _step(method, branches, options, tensors), options).losses


def _read(method: Method, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors by name, in float64, all of one length except those of the KL term."""
    wanted = [*_tensors(method), *_sides(method, LENGTHS)]
    tensors = {name: _float64(given[name]) for name in wanted if given[name] is not None}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for of_kl in (False, True):
        found = {name: shape for name, shape in shapes.items() if (name in KL) == of_kl}
        if len(set(found.values())) > 1 or any(len(shape) != 1 for shape in found.values()):
            listed = ", ".join(f"{name} {list(shape)}" for name, shape in found.items())
            raise UsageError(
                f"losses.{method.name} takes tensors of one dimension and one length: {listed}."
            )
    return tensors


def _float64(values: Any) -> Tensor:
    """The values in float64; other than tensors are copied: a frame's column is read-only."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    return tensor.to(torch.float64)


def _branches(method: Method, tensors: Mapping[str, Tensor]) -> Branches:
    """All completions of the call in the trainer's order: of pairs, the chosen one first."""

    def woven(prefix: str, name: str) -> Tensor | None:
        sides = [tensors.get(f"{prefix}{side}") for side in _sides(method, name)]
        present = [side for side in sides if side is not None]
        return torch.stack(present, dim=1).flatten() if len(present) == len(sides) else None

    value = "scores" if method.head == "score" else "logps"
    logps = woven("", value)
    assert logps is not None, "the signature requires it"
    reference, lengths, scores = woven("reference_", value), woven("", LENGTHS), woven("", "scores")
    return Branches(
        logps=logps,
        reference=torch.zeros_like(logps).detach() if reference is None else reference.detach(),
        num_tokens=torch.ones_like(logps) if lengths is None else lengths,
        roles=_roles(method, tensors, logps),
        scores=torch.full_like(logps, torch.nan) if scores is None else scores,
        rows=torch.arange(len(logps), device=logps.device) // len(_sides(method, value)),
        step_indices=torch.arange(len(logps), device=logps.device),
    )


def _roles(method: Method, tensors: Mapping[str, Tensor], logps: Tensor) -> Tensor:
    if method.rows == "labelled":
        is_desirable = tensors["labels"] > 0
        return torch.where(is_desirable, int(Role.DESIRABLE), int(Role.UNDESIRABLE)).to(torch.int8)
    roles = torch.full_like(logps, int(Role.CHOSEN), dtype=torch.int8)
    if method.rows == "paired":
        roles[1::2] = int(Role.REJECTED)
    return roles


def _step(method: Method, branches: Branches, options: Any, tensors: Mapping[str, Tensor]) -> Step:
    """A step of these completions alone, the first of its run."""
    if "mismatched" in method.needs:
        policy, reference = (tensors[name].detach() for name in KL)
        mismatched = policy - reference
    else:
        mismatched = branches.logps.new_empty(0)
    pre_pass = method.pre_pass(branches, options) if method.pre_pass else {}
    return Step(
        rows=len(branches.logps) // len(_sides(method, LENGTHS)),
        branches=len(branches.logps),
        tokens=int(branches.num_tokens.sum()),
        chosen_tokens=int(branches.num_tokens[is_good(branches)].sum()),
        mismatched=mismatched,
        pre_pass=pre_pass,
        state=method.update_state((), pre_pass) if method.update_state else (),
    )


@cache
def _reads_lengths(method: Method, options: Any) -> bool:
    """Whether the loss depends on the lengths of completions, tested with two lengths."""
    if method.rows == "labelled":
        options = method.resolve_auto(options, Labels(1, 1)).options
    values = {
        name: torch.tensor([-3.0, -7.0], dtype=torch.float64) - index**2
        for index, name in enumerate(_tensors(method))
    }
    if method.rows == "labelled":
        values["labels"] = torch.tensor([1.0, 0.0])
    losses = []
    for longer in (0, 1):  # and the second side of a pair by more than the first
        sides = enumerate(_sides(method, LENGTHS), start=1)
        lengths = {name: torch.full((2,), 1.0 + longer * side) for side, name in sides}
        losses.append(_computed(method, options, {**values, **lengths}))
    return not torch.equal(*losses)
