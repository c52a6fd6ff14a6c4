"""Parses `--method` and the options of methods, with hints for unknown names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from ...schemas.errors import UsageError, closest, did_you_mean
from ...schemas.option import wrong_value
from . import losses
from .method import METHODS, STEP_OPTIONS, Method, Options
from .modifiers import Modifiers, names_within
from .objective import Objective, Term

__all__ = ["METHODS", "STEP_OPTIONS", "find_method", "losses", "objective_of", "options_of"]
Checked = TypeVar("Checked", bound=Options)


def find_method(name: str) -> Method:
    """The method of this name; the error for an unknown name suggests the closest ones."""
    if name in METHODS:
        return METHODS[name]
    asked = name.lower()
    longer = [known for known in METHODS if asked and known.startswith(asked)]
    nearest = [asked] if asked in METHODS else longer or closest(asked, METHODS, 3)
    hint = did_you_mean(nearest) or f" Known: {', '.join(METHODS)}."
    raise UsageError(f"method '{name}': no such method.{hint} `align methods` lists them all.")


def options_of(method: Method, values: Mapping[str, Any]) -> Options:
    """The method's options with these values, and defaults for the others."""
    return _checked(method.options, values, method.name)


def options_of_all() -> dict[str, str]:
    """The meaning, default and methods of every option.

    If an option has several meanings, the most common one; `align methods NAME` has the others.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for method in METHODS.values():
        taken = names_within(method.modifiers)
        modifiers = {name: one for name, one in Modifiers.model_fields.items() if name in taken}
        for name, one in {**method.options.model_fields, **modifiers}.items():
            text = f"{one.description} (default {shown(one.default) or 'none'}"
            found.setdefault(name, {}).setdefault(text, []).append(method.name)
    meanings = {}
    for name, texts in found.items():
        text, names = max(texts.items(), key=lambda one: len(one[1]))
        of = ", ".join(names) if len(names) <= 3 else f"{len(names)} methods"
        meanings[name] = f"{text}; of {of})"
    return meanings


def shown(value: float | str) -> str:
    """The value of an option as a user writes it."""
    return str(value) if isinstance(value, str | bool) else f"{value:g}"


def objective_of(name: str, values: Mapping[str, Any]) -> Objective:
    """The objective that `--method` names: one method, or several as `dpo:0.8+sft:0.2`.

    In a mixture an option is named after its method: `dpo.beta`, or `beta` in a section `dpo`.
    """
    named = [_weighted(text) for text in name.split("+")]
    methods = [find_method(method) for method, _ in named]
    known = Modifiers.model_fields
    options = _flat({key: value for key, value in values.items() if key not in known})
    given = {key: value for key, value in values.items() if key in known}
    modifiers = _checked(Modifiers, given, "method")
    for method in methods:
        for one in sorted(modifiers.required - method.modifiers):
            able = ", ".join(other.name for other in METHODS.values() if one in other.modifiers)
            raise UsageError(
                f"method.{one} is not for {method.name}. Methods that take it: {able}."
            )
    modifiers.require_in_use()
    if len(methods) == 1:
        if ":" in name:
            raise UsageError(f"method '{name}': only a mixture has weights. Leave the weight out.")
        return Objective((Term(methods[0], options_of(methods[0], options)),), modifiers)
    _require_mixable(methods, options)
    terms = []
    for method, (_, weight) in zip(methods, named, strict=True):
        prefix = f"{method.name}."
        own = {key.removeprefix(prefix): options[key] for key in options if key.startswith(prefix)}
        where = f"method.{method.name}"
        terms.append(Term(method, _checked(method.options, own, method.name, where), weight))
    _require_agreed(terms)
    return Objective(tuple(terms), modifiers)


def _checked(
    model: type[Checked], values: Mapping[str, Any], name: str, where: str = "method"
) -> Checked:
    """The options with these values; the error for a wrong one names the allowed values."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, known = str(first["loc"][0]), list(model.model_fields)
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(closest(key, known)) or f" Known: {', '.join(known) or 'none'}."
            raise UsageError(f"{name}: unknown option '{where}.{key}'.{hint}") from error
        raise UsageError(f"{name}: {where}.{key} {wrong_value(error)}") from error


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with those in sections flattened to dotted names."""
    flat = {key: value for key, value in options.items() if not isinstance(value, dict)}
    for section, inside in options.items():
        if isinstance(inside, dict):
            flat |= {f"{section}.{name}": value for name, value in inside.items()}
    return flat


def _weighted(text: str) -> tuple[str, float]:
    """The name and the weight of `dpo:0.8`."""
    name, colon, weight = (word.strip() for word in text.partition(":"))
    if not colon:
        return name, 1.0
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(
            f"method '{text}': {weight!r} is not a weight. Write it as dpo:0.8+sft:0.2."
        )
    return name, value


def _require_mixable(methods: Sequence[Method], options: Mapping[str, Any]) -> None:
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise UsageError(f"method '{'+'.join(names)}': name each method of a mixture once.")
    if len({method.head for method in methods}) > 1:
        raise UsageError(f"{' and '.join(names)} need different models. Train them separately.")
    kinds = {method.rows for method in methods}
    if "grouped" in kinds and len(kinds) > 1:
        grouped = [method.name for method in methods if method.rows == "grouped"]
        raise UsageError(f"{grouped[0]} learns from scored groups. Train it without a mixture.")
    for name in options:
        if not name.startswith(tuple(f"{method}." for method in names)):
            raise UsageError(
                f"method.{name}: name an option of a mixture after its method, for example "
                f"method.{names[0]}.{name}."
            )


def _require_agreed(terms: Sequence[Term]) -> None:
    """Refuses terms that differ in a step option: a step has one set of KL completions."""
    for name in STEP_OPTIONS:
        given = {
            f"method.{term.method.name}.{name}": getattr(term.options, name)
            for term in terms
            if name in term.method.fields
        }
        if len(set(given.values())) > 1:
            listed = " and ".join(f"{option} is {value}" for option, value in given.items())
            raise UsageError(
                f"{listed}: the methods of a mixture share the KL completions of a step. Set both "
                "to one value."
            )
