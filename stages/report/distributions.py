"""How single held-out completions came out, drawn."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .charts import Series, Values, chart, histogram

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .charts import Point
    from .evaluation_table import Completion, Table

COLORS = {"chosen": "c0", "desirable": "c0", "rejected": "c1", "undesirable": "c1"}
GOOD, BAD = ("chosen", "desirable"), ("rejected", "undesirable")


def spread_charts(first: Table, last: Table) -> str:
    """Of the last evaluation, pairs also of the first; the two may be the same."""
    by_role = _by_role(last.completions)
    groups = [
        Values(role, [one.value for one in own], _color(role)) for role, own in by_role.items()
    ]
    margins = [
        Values(name, found, color)
        for name, found, color in (
            ("before", [] if first is last else _margins(first.completions), "c3"),
            ("after", _margins(last.completions), "c2"),
        )
        if any(found)
    ]
    clouds = [
        Series(role, list(_by_length(own)), _color(role), form="cloud")
        for role, own in by_role.items()
    ]
    left_out = f", without {last.others:,} not finite" if last.others else ""
    return "".join(
        [
            histogram(f"{last.what}s of completions{left_out}", groups, across=last.unit),
            histogram("Good less bad completion of a row", margins, across=last.unit),
            chart(f"{last.what} by length", clouds, across="tokens", up=last.unit),
        ]
    )


def _by_role(measured: Sequence[Completion]) -> dict[str, list[Completion]]:
    found: defaultdict[str, list[Completion]] = defaultdict(list)
    for one in measured:
        found[one.role].append(one)
    return dict(sorted(found.items()))


def _by_length(measured: Sequence[Completion]) -> Iterator[Point]:
    return ((float(one.num_tokens), one.value) for one in measured)


def _margins(measured: Sequence[Completion]) -> list[float]:
    """Of the rows that hold a good completion and a bad one."""
    good = {one.row: one.value for one in measured if one.role in GOOD}
    bad = {one.row: one.value for one in measured if one.role in BAD}
    return [good[row] - bad[row] for row in good if row in bad]


def _color(role: str) -> str:
    return COLORS.get(role, "c2")
