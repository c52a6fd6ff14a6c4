"""A setting: its default, the sentence that explains it, and its bounds."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any,
    description: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """A field with a default, what `align init` and `--help` say of it, and its bounds.

    pydantic reads the metadata, by these names, when a value is checked.
    """
    metadata = {"description": description, "ge": ge, "gt": gt, "le": le, "lt": lt}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)
