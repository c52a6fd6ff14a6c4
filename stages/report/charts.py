"""Curves, histograms and scatter plots as SVG, without scripts or libraries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from ...schemas.safe_text import escape
from .axes import (
    HEIGHT,
    WIDTH,
    Scale,
    drawn_axes,
    plain,
    scale_between,
    scale_of_x,
    scale_of_y,
    widened,
)
from .smoothing import running_mean, window_of

Point = tuple[float, float]
Metrics: TypeAlias = "Mapping[str, Sequence[Point]]"  # by name, (step, value) each
Form = Literal["line", "dots", "cloud"]
Best = Literal["", "lowest", "highest"]

MOST_POINTS = 400
FEW = 30  # points of a line that are marked
BINS = 28
LARGEST = 1e300


@dataclass(frozen=True)
class Series:
    """A series of points; `color` is one of the page's classes, c0 to c7."""

    name: str
    points: Sequence[Point]
    color: str
    form: Form = "line"  # dots: a line with marked points; cloud: no line
    best: Best = ""  # the point to be marked


@dataclass(frozen=True)
class Values:
    """Numbers of one kind, for a histogram."""

    name: str
    values: Sequence[float]
    color: str


@dataclass(frozen=True)
class _Curve:
    """A series as it is drawn: itself, and a smoothed line if it is long and noisy."""

    series: Series
    smooth: Sequence[Point] = ()
    window: int = 0

    @staticmethod
    def of(series: Series, y: Scale) -> _Curve:
        heights = [y.height(value) for _, value in series.points]
        if series.form != "line" or not (window := window_of(heights)):
            return _Curve(series)
        means = map(y.value, running_mean(heights, window).tolist())
        smooth = zip((x for x, _ in series.points), means, strict=True)
        return _Curve(series, list(smooth), window)


def chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str = "",
    may_be_log: bool = False,
) -> str:
    """A figure with one or more series; empty if none has a point."""
    shown = [replace(one, points=list(filter(_can_be_drawn, one.points))) for one in series]
    shown = [one for one in shown if one.points]
    if not shown:
        return ""
    x = scale_of_x([at for one in shown for at, _ in one.points])
    y = scale_of_y([value for one in shown for _, value in one.points], may_be_log=may_be_log)
    curves = [_Curve.of(one, y) for one in shown]
    drawn = "".join(_drawn(one, x, y) for one in curves)
    keys = [_key(f"{one.color} {one.form}", one.name) for one in shown]
    keys += [_key(f"{one.color} best", _best_said(one, x_label)) for one in shown if one.best]
    keys += [f'<span class="key">{note}</span>' for note in _notes(curves, y)]
    return _figure(title, keys, drawn_axes(x, y, x_label, y_label) + drawn)


def histogram(title: str, groups: Sequence[Values], *, x_label: str) -> str:
    """A figure of histograms with common bins, as outlines over one another."""
    kept = [
        replace(group, values=[value for value in group.values if abs(value) < LARGEST])
        for group in groups
    ]
    shown = [group for group in kept if group.values]
    if not shown:
        return ""
    every = [value for group in shown for value in group.values]
    low, high = widened(min(every), max(every))
    width = (high - low) / BINS
    counts = [_counted(group.values, low, width) for group in shown]
    x = scale_between(low, high, is_x=True)
    y = scale_between(0, max(map(max, counts)) * 1.05, is_x=False)
    drawn = "".join(
        _outline(group.color, heights, [low + edge * width for edge in range(BINS + 1)], x, y)
        for group, heights in zip(shown, counts, strict=True)
    )
    keys = [_key(f"{group.color} bars", group.name) for group in shown]
    return _figure(title, keys, drawn_axes(x, y, x_label, "count") + drawn)


def _drawn(curve: _Curve, x: Scale, y: Scale) -> str:
    one, parts = curve.series, []
    points = one.points if one.form == "cloud" else _thinned(one.points)
    if one.form != "cloud":
        parts.append(_polyline(one, "faint" if curve.window else one.form, points, x, y))
        if curve.window:
            parts.append(_polyline(one, "line", _thinned(curve.smooth), x, y))
    if one.form != "line" or len(points) <= FEW:
        for at, value in points:
            tip = escape(f"{one.name}: {plain(value)} at {plain(at)}")
            parts.append(
                _circle(f"{one.color} {one.form}", x(at), y(value), f"<title>{tip}</title>")
            )
    if one.best:
        at, value = _best_of(one)
        parts.append(_circle(f"{one.color} best", x(at), y(value)))
    return "".join(parts)


def _polyline(one: Series, kind: str, points: Sequence[Point], x: Scale, y: Scale) -> str:
    path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
    name = f"<title>{escape(one.name)}</title>"
    return f'<polyline class="{one.color} {kind}" points="{path}">{name}</polyline>'


def _circle(kind: str, x: float, y: float, inner: str = "") -> str:
    radius = 6 if "best" in kind else 3
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{inner}</circle>'


def _best_of(series: Series) -> Point:
    """The first of the best points."""
    choose = min if series.best == "lowest" else max
    return choose(series.points, key=lambda point: point[1])


def _best_said(series: Series, x_label: str) -> str:
    at, value = _best_of(series)
    return f"{series.best}: {plain(value)} at {x_label} {plain(at)}"


def _notes(curves: Sequence[_Curve], y: Scale) -> Iterator[str]:
    """How the numbers were made into lines, as far as that is no matter of course."""
    if windows := {curve.window for curve in curves if curve.window}:
        low, high = min(windows), max(windows)
        lines = f"{low:,} lines" if low == high else f"{low:,} to {high:,} lines"
        yield f"smoothed: {'geometric mean' if y.is_log else 'mean'} of {lines}"
    if y.is_log:
        yield "log axis"


def _outline(color: str, heights: Sequence[int], edges: Sequence[float], x: Scale, y: Scale) -> str:
    floor = f"{y(0):.1f}"
    corners = [f"{x(edges[0]):.1f},{floor}"]
    for height, ends in zip(heights, pairwise(edges), strict=True):
        corners += [f"{x(edge):.1f},{y(height):.1f}" for edge in ends]
    corners.append(f"{x(edges[-1]):.1f},{floor}")
    return f'<polygon class="{color} bars" points="{" ".join(corners)}"/>'


def _key(kind: str, name: str) -> str:
    return f'<span class="key"><i class="{kind}"></i>{escape(name)}</span>'


def _figure(title: str, keys: Sequence[str], drawing: str) -> str:
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{''.join(keys)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{drawing}</svg></figure>"
    )


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """A limited number of the points, with the highest and the lowest of each interval."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / MOST_POINTS)
    return [
        point
        for start in range(0, len(points), size)
        for point in _extremes(points[start : start + size])
    ]


def _extremes(points: Sequence[Point]) -> list[Point]:
    low = min(points, key=lambda point: point[1])
    high = max(points, key=lambda point: point[1])
    return sorted({low, high})


def _counted(values: Sequence[float], low: float, width: float) -> list[int]:
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / width))] += 1
    return counts


def _can_be_drawn(point: Point) -> bool:
    """Whether lengths between such points are still numbers."""
    return all(abs(value) < LARGEST for value in point)
