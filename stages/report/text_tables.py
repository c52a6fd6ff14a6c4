"""Tables and lists as plain text, for a terminal or a log."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

WIDTH = 88
SPREAD = ("min", "p50", "p90", "p99", "max", "mean")
NOTES = {  # counted in stage 1
    "rows_that_repeat_another_row": "duplicate rows",
    "rows_whose_template_changes_the_prompt": (
        "rows whose prompt changes when the template adds the answer (thinking blocks?)"
    ),
}


def heading(title: str) -> str:
    """A title on a line of the full width."""
    return f"── {title} ".ljust(WIDTH, "─")


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: the first column left-aligned, the others right-aligned."""
    table = [[printable(cell) for cell in row] for row in (head, *rows)]
    columns = range(len(head))
    widths = [max(8 if at else 12, *(_width(row[at]) for row in table)) for at in columns]
    lines = []
    for row in table:
        blanks = [" " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [row[0] + blanks[0], *(blanks[at] + row[at] for at in columns[1:])]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def facts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """The lines of a list of names and values."""
    width = max(12, *(len(name) for name, _ in pairs))
    return [f"  {name.ljust(width)}  {printable(value)}".rstrip() for name, value in pairs]


def spreads(
    title: str,
    found: Sequence[tuple[str, Mapping[str, float]]],
    names: Sequence[str] = SPREAD,
    *,
    decimals: int,
) -> list[str]:
    """The lines of a table with the quantiles of several distributions."""
    lines = [
        (label, *(f"{spread[name]:,.{decimals}f}" for name in names)) for label, spread in found
    ]
    return grid((title, *names), lines)


def worded(note: str) -> str:
    """The name of a note as text; a column name at its end is unchanged."""
    name, quote, column = note.partition("'")
    return NOTES.get(note) or name.replace("_", " ") + quote + column


def share(part: float, whole: float) -> str:
    """A share in percent; a small share is never shown as 0 %, nor a large one as 100 %."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.05:
        return "<0.1%"
    return ">99.9%" if 99.95 <= percent < 100 else f"{percent:.1f}%"


def size(num_bytes: int) -> str:
    """A number of bytes with its unit."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:,.1f} TB"


def duration(seconds: float) -> str:
    """A duration in hours and minutes, or in seconds if it is under a minute."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def printable(text: str) -> str:
    """One line without control characters."""
    return "".join(character for character in text if character.isprintable())


def _width(text: str) -> int:
    """The width of a text on a terminal, in columns."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))
