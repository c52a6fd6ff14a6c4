"""The table of methods as the README shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .describe import describe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...schemas.methods import Method

_HEAD = ("method", "loss of a row, completion or token", "reads", "options")


def markdown_table(methods: Iterable[Method]) -> str:
    """One line a method, in the order of the table."""
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD))]
    for told in map(describe, methods):
        options = ", ".join(f"{option.name} {_shown(option.default)}" for option in told.options)
        lines.append(_line([f"`{told.name}`", f"`{told.formula}`", told.rows, options]))
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _shown(value: float | str) -> str:
    return str(value) if isinstance(value, str | bool) else f"{value:g}"
