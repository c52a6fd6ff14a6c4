"""Options of methods: numbers with bounds, and the refusal of what lies outside."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

from ...schemas.errors import UsageError

BOUNDS = {
    "least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "below": (operator.lt, "below"),
    "most": (operator.le, "at most"),
}


def number(
    default: Any,
    help_text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> Any:
    """A field with a default, its explanation, and the range a number in it must keep to."""
    metadata = {"help": help_text, "least": least, "above": above, "below": below, "most": most}
    return dataclasses.field(default=default, metadata=metadata)


def beta(default: float) -> Any:
    """The field every method with a temperature has."""
    return number(default, "how far the policy may go: lower lets it go further", above=0)


def label_smoothing(default: float) -> Any:
    """The field of methods that allow for wrong labels."""
    help_text = "share of pairs taken to be labelled the wrong way round"
    return number(default, help_text, least=0, below=0.5)


def sft_weight() -> Any:
    """The field of methods that may imitate the chosen branch as well."""
    return number(0.0, "adds this much of the chosen branch's likelihood, as RPO does", least=0)


def check_bounds(options: Any, where: str = "method") -> None:
    """Refuses numbers that are infinite, NaN or outside their field's range."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, int | float) and not _fits(value, field):
            raise UsageError(f"{where}.{field.name} is {value}; it must be {range_of(field)}.")


def range_of(field: dataclasses.Field[Any]) -> str:
    """The range of a field in words: `at least 0 and below 0.5`."""
    words = [f"{text} {limit:g}" for _, text, limit in _limits(field)]
    return " and ".join(words) or "a finite number"


def _fits(value: float, field: dataclasses.Field[Any]) -> bool:
    return math.isfinite(value) and all(fits(value, limit) for fits, _, limit in _limits(field))


def _limits(field: dataclasses.Field[Any]) -> list[tuple[Any, str, float]]:
    given = ((*BOUNDS[name], field.metadata.get(name)) for name in BOUNDS)
    return [(fits, text, limit) for fits, text, limit in given if limit is not None]
