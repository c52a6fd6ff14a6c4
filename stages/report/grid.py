"""Headings and columns of plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 88


def heading(title: str) -> str:
    """A title on a rule as wide as the page."""
    return f"── {title} ".ljust(WIDTH, "─")


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: names at the left, numbers ranged right."""
    lines = [list(head), *(list(row) for row in rows)]
    first = max(12, *(len(line[0]) for line in lines))
    widths = [max(8, *(len(line[i]) for line in lines)) for i in range(1, len(head))]
    return [_line(line, first, widths) for line in lines]


def facts(pairs: Sequence[Sequence[str]]) -> list[str]:
    """Lines of names and what they stand for."""
    width = max(12, *(len(pair[0]) for pair in pairs))
    return [f"  {pair[0].ljust(width)}  {pair[1]}".rstrip() for pair in pairs]


def printable(text: str) -> str:
    """One line, without anything a terminal would obey."""
    return "".join(character for character in text if character.isprintable())


def worded(note: str) -> str:
    """The name of a note in words; a column that it ends with stays as it is."""
    name, quote, column = note.partition("'")
    return name.replace("_", " ") + quote + column


def share(part: float, whole: float) -> str:
    """A part of a whole in percent, never rounded to none or to all."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.05:
        return "<0.1%"
    if 99.95 <= percent < 100:
        return ">99.9%"
    return f"{percent:.1f}%"


def size(num_bytes: int) -> str:
    """Bytes for a person."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:,.1f} TB"


def _line(cells: Sequence[str], first: int, widths: Sequence[int]) -> str:
    numbers = (cell.rjust(width) for cell, width in zip(cells[1:], widths, strict=True))
    return "  ".join(["", cells[0].ljust(first), *numbers]).rstrip()
