"""The table of methods: every name that `--method` takes, and the parsing of its options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...schemas.errors import UsageError, closest, did_you_mean
from ...schemas.json_codec import CodecError, from_plain
from ...schemas.methods import Method
from .anchored import APO_DOWN, APO_ZERO, BCO_PAIR, NCA, SPPO
from .dpo import CDPO, DISCOPOP, DPO, DPO_NORM, EXO, HINGE, IPO, ROBUST
from .kto import APO_ZERO_UNPAIRED, BCO, KTO, KTO_LOGSIGMOID, KTO_ZERO
from .modifiers import Modifiers, require_in_use
from .optimal_transport import AOT, AOT_UNPAIRED
from .policy_gradient import GRPO, PPO
from .recipe import Part, Recipe
from .reference_free import CPO, ORPO, SIMPO, SLIC
from .reward_aware import RPO_BWD_KL, RPO_FWD_KL, RPO_SQ
from .rewards import REWARD, REWARD_BINARY
from .sft import CSFT, SFT

_FAMILIES = (
    (DPO, CDPO, ROBUST, EXO, HINGE, DISCOPOP, IPO, DPO_NORM),
    (NCA, BCO_PAIR, SPPO, APO_ZERO, APO_DOWN),
    (AOT, AOT_UNPAIRED),
    (RPO_SQ, RPO_BWD_KL, RPO_FWD_KL),
    (ORPO, SIMPO, CPO, SLIC),
    (KTO, KTO_ZERO, KTO_LOGSIGMOID, APO_ZERO_UNPAIRED, BCO),
    (GRPO, PPO),
    (SFT, CSFT),
    (REWARD, REWARD_BINARY),
)
METHODS: dict[str, Method] = {method.name: method for family in _FAMILIES for method in family}
# Options of the step, which all methods of a mixture have to agree on.
STEP_OPTIONS = ("kl_use", "kl_per_step")


def find_method(name: str) -> Method:
    """The method of this name; an unknown name is refused with the closest ones."""
    if name in METHODS:
        return METHODS[name]
    hint = did_you_mean(_nearest(name.lower())) or f" Known: {', '.join(METHODS)}."
    raise UsageError(f"method '{name}': no such method.{hint} `align methods` explains them.")


def options_of(method: Method, values: Mapping[str, Any]) -> Any:
    """The method's options with these values, and defaults for the others."""
    return _read(method.options, values, method.name)


def recipe_of(name: str, values: Mapping[str, Any]) -> Recipe:
    """The recipe that `--method` names: one method, or several as `dpo:0.8+sft:0.2`.

    In a mixture an option is named after its method: `dpo.beta`, or `beta` in a section `dpo`.
    """
    named = [_weighted(text) for text in name.split("+")]
    methods = [find_method(method) for method, _ in named]
    known = {field.name for field in dataclasses.fields(Modifiers)}
    options = _flat({key: value for key, value in values.items() if key not in known})
    modifiers = _read(Modifiers, {key: values[key] for key in values if key in known}, "method")
    for method in methods:
        _require_allowed(method, modifiers)
    require_in_use(modifiers)
    if len(methods) == 1:
        if ":" in name:
            raise UsageError(f"method '{name}': a weight means something in a mixture only.")
        return Recipe((Part(methods[0], options_of(methods[0], options)),), modifiers)
    _require_mixable(methods, options)
    parts = [
        Part(method, _those_of(method, options), weight)
        for method, (_, weight) in zip(methods, named, strict=True)
    ]
    _require_agreed(parts)
    return Recipe(tuple(parts), modifiers)


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with those in sections flattened to dotted names."""
    sections = {key: value if isinstance(value, dict) else None for key, value in options.items()}
    inside = {
        f"{key}.{name}": value
        for key, section in sections.items()
        if section is not None
        for name, value in section.items()
    }
    return {**{key: options[key] for key in options if sections[key] is None}, **inside}


def _read(
    options: type[Any], values: Mapping[str, Any], name: str, *, where: str = "method"
) -> Any:
    try:
        return from_plain(options, dict(values), where=where)
    except CodecError as error:
        raise UsageError(f"{name}: {error}") from error


def _weighted(text: str) -> tuple[str, float]:
    """The name and the weight of `dpo:0.8`."""
    name, colon, weight = (part.strip() for part in text.partition(":"))
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


def _those_of(method: Method, options: Mapping[str, Any]) -> Any:
    """The options of one method of a mixture."""
    prefix = f"{method.name}."
    own = {
        name.removeprefix(prefix): value
        for name, value in options.items()
        if name.startswith(prefix)
    }
    return _read(method.options, own, method.name, where=f"method.{method.name}")


def _require_allowed(method: Method, modifiers: Modifiers) -> None:
    for name in sorted(modifiers.required - method.modifiers):
        able = [other.name for other in METHODS.values() if name in other.modifiers]
        raise UsageError(
            f"method.{name} is not for {method.name}. Methods that take it: {', '.join(able)}."
        )


def _require_mixable(methods: Sequence[Method], options: Mapping[str, Any]) -> None:
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise UsageError(f"method '{'+'.join(names)}': each method can stand in a mixture once.")
    if len({method.head for method in methods}) > 1:
        raise UsageError(f"{' and '.join(names)} need different models: they cannot be mixed.")
    kinds = {method.rows for method in methods}
    if "grouped" in kinds and len(kinds) > 1:
        grouped = [method.name for method in methods if method.rows == "grouped"]
        raise UsageError(f"{grouped[0]} learns from groups of scored rows: it cannot be mixed.")
    for name in options:
        if not name.startswith(tuple(f"{method}." for method in names)):
            raise UsageError(
                f"method.{name}: in a mixture an option is named after its method, for example "
                f"method.{names[0]}.{name}."
            )


def _require_agreed(parts: Sequence[Part]) -> None:
    """Refuses parts that differ in a step option: a step has one set of mismatched branches."""
    for name in STEP_OPTIONS:
        given = {
            f"method.{part.method.name}.{name}": getattr(part.options, name)
            for part in parts
            if hasattr(part.options, name)
        }
        if len(set(given.values())) > 1:
            listed = " and ".join(f"{option} is {value}" for option, value in given.items())
            raise UsageError(
                f"{listed}: the parts of a mixture share the mismatched completions of a step. Set "
                "both alike."
            )


def _nearest(asked: str) -> list[str]:
    if asked in METHODS:
        return [asked]
    longer = [name for name in METHODS if asked and name.startswith(asked)]
    return longer or closest(asked, METHODS, 3)
