"""How single held-out completions came out, drawn."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import TYPE_CHECKING

from .charts import BINS, Series, Values, chart, histogram
from .evaluation_table import UNITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .charts import Point
    from .evaluation_table import Completion, Table

COLORS = {"chosen": "c0", "desirable": "c0", "rejected": "c1", "undesirable": "c1"}
GOOD, BAD = ("chosen", "desirable"), ("rejected", "undesirable")


def spread_charts(tables: Mapping[int, Table]) -> str:
    """Of the last evaluation, margins also of the first; by their steps, rising."""
    last = tables[max(tables)]
    unit, by_role = UNITS[last.kind], _by_role(last.completions)
    groups = [
        Values(role, [one.value for one in own], _color(role)) for role, own in by_role.items()
    ]
    clouds = [
        Series(role, _by_length(own), _color(role), form="cloud") for role, own in by_role.items()
    ]
    left_out = f", without {last.others:,} not finite" if last.others else ""
    return "".join(
        [
            histogram(f"{last.kind.capitalize()} of completions{left_out}", groups, across=unit),
            histogram("Margins of rewards within a row", _margins(tables), across="reward"),
            chart(f"{last.kind.capitalize()} by length", clouds, across="tokens", up=unit),
        ]
    )


def _margins(tables: Mapping[int, Table]) -> list[Values]:
    """Of the last step; of the first where they differ, for one tall bar would hide the others."""
    last = margins_of(tables[max(tables)].completions)
    found = [Values(f"after step {max(tables):,}", last, "c2")]
    if len(tables) > 1 and last:
        first = margins_of(tables[min(tables)].completions)
        if first and max(first) - min(first) > (max(last) - min(last)) / BINS:
            found.insert(0, Values(f"after step {min(tables):,}", first, "c3"))
    return found


def margins_of(completions: Iterable[Completion]) -> list[float]:
    """Mean reward of the good less that of the bad, of the rows that hold both."""
    good: defaultdict[int, list[float]] = defaultdict(list)
    bad: defaultdict[int, list[float]] = defaultdict(list)
    for one in completions:
        side = good if one.role in GOOD else bad if one.role in BAD else None
        if side is not None and one.reward is not None:
            side[one.row].append(one.reward)
    return [fmean(good[row]) - fmean(bad[row]) for row in good if row in bad]


def _by_role(completions: Iterable[Completion]) -> dict[str, list[Completion]]:
    found: defaultdict[str, list[Completion]] = defaultdict(list)
    for one in completions:
        found[one.role].append(one)
    return dict(sorted(found.items()))


def _by_length(completions: Sequence[Completion]) -> list[Point]:
    return [(float(one.num_tokens), one.value) for one in completions]


def _color(role: str) -> str:
    return COLORS.get(role, "c2")
