"""JSON of strangers: parsed in bounded time and memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import chain
from typing import Any, NoReturn

MOST_VALUES = 8_000_000  # they take about 1 GiB in Python
DEEPEST = 100  # containers in each other


def json_object(content: bytes) -> dict[str, Any]:
    """The object of a JSON text; ValueError for any other text, TypeError for another value."""
    values = sum(map(content.count, (b"[", b"{", b",")))
    if values > MOST_VALUES:
        raise ValueError(f"about {values:,} values, and {MOST_VALUES:,} are the most")
    try:
        # Of a name that is there twice, another reader may take the other value.
        value = json.loads(content, parse_constant=_constant, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None
    if not isinstance(value, dict):
        raise TypeError
    if _is_deep(value):
        raise ValueError(f"lists and objects are nested more than {DEEPEST} deep")
    if b"NaN" in content and (name := _name_of_nan(value)):
        raise ValueError(f"{name!r:.100} is NaN, which is no number")
    return value


def _constant(name: str) -> float:
    return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}[name]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        _refuse_twice(name for name, _ in pairs)
    return made


def _refuse_twice(names: Iterable[str]) -> NoReturn:
    seen: set[str] = set()
    twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    raise ValueError(f"{twice!r:.100} is there twice")


def _name_of_nan(value: Any, name: str = "") -> str:
    """The name of a setting that is NaN or has it in a list; empty where none is."""
    if isinstance(value, float) and math.isnan(value):
        return name
    if isinstance(value, dict):
        return next(filter(None, (_name_of_nan(one, key) for key, one in value.items())), "")
    if isinstance(value, list):
        return next(filter(None, (_name_of_nan(one, name) for one in value)), "")
    return ""


def _is_deep(value: Any) -> bool:
    """Whether containers are nested deeper than functions that call themselves can follow."""
    level = [value]
    for _ in range(DEEPEST):
        contents = [outer.values() if isinstance(outer, dict) else outer for outer in level]
        # Fast, for a vocabulary and its merges.
        if _CONTAINERS.isdisjoint(map(type, chain.from_iterable(contents))):
            return False
        level = [inner for inner in chain.from_iterable(contents) if type(inner) in _CONTAINERS]
    return True


_CONTAINERS = frozenset({dict, list})
