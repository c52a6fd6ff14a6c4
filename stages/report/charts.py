"""Curves, scatter plots and histograms as SVG, without scripts or libraries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ...schemas.safe_text import escape

Point: TypeAlias = tuple[float, float]
Curves: TypeAlias = Mapping[str, Sequence[Point]]  # by metric, (step, value) each

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 36  # margins of the plot
MAX_POINTS = 400  # points of a drawn line; longer curves are thinned
MARKED = 30  # a line with at most this many points has a mark on each
SMOOTHED = 60  # a noisy curve with at least this many points gets a moving mean
NOISY = 4  # a curve is noisy if its total variation is this many times its range
BINS = 28
LARGEST = 1e300  # larger values are left out, because their differences overflow


@dataclass(frozen=True)
class Series:
    """Named points; `color` is one of the page's classes, c0 to c7."""

    name: str
    points: Sequence[Point]
    color: str
    form: Literal["line", "dots", "cloud", "ring"] = "line"  # dots: a dashed line with marks


def chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str = "") -> str:
    """A figure with these series; empty if none has a finite point."""
    drawable = {
        number: [point for point in one.points if all(abs(value) < LARGEST for value in point)]
        for number, one in enumerate(series)
    }
    every = [point for points in drawable.values() for point in points]
    if not every:
        return ""
    steps, values = zip(*every, strict=True)
    low, high = min(steps), max(steps)
    margin = 1 if low == high else 0
    is_whole = all(step == int(step) for step in steps)
    x = Axis(low - margin, high + margin, LEFT, WIDTH - RIGHT, is_whole=is_whole)
    y = Axis(*_widened(min(values), max(values)), HEIGHT - BOTTOM, TOP)
    keys = dict[str, str]()  # name in the legend -> CSS classes
    shapes = list[str]()
    windows = set[int]()
    for number, points in drawable.items():
        one = series[number]
        if not points:
            continue
        keys.setdefault(one.name, f"{one.color} {one.form}")
        smooth, window = _smoothed(points) if one.form == "line" else (points, 0)
        if window:
            windows.add(window)
            shapes.append(_polyline(f"{one.color} faint", _thinned(points), x, y))
        if one.form in ("line", "dots"):
            shapes.append(_polyline(f"{one.color} {one.form}", _thinned(smooth), x, y))
        if one.form != "line" or len(points) <= MARKED:
            for step, value in points:
                tip = escape(f"{one.name}: {plain(value)} at {plain(step)}")
                shapes.append(
                    f'<circle class="{one.color} {one.form}" cx="{x(step):.1f}" '
                    f'cy="{y(value):.1f}" r="3"><title>{tip}</title></circle>'
                )
    notes = [f"mean of {' or '.join(map(str, sorted(windows)))} lines"] if windows else []
    return _figure(title, keys, notes, [_axes(x, y, x_label, y_label), *shapes])


def histogram(
    title: str, groups: Sequence[tuple[str, Sequence[float], str]], *, x_label: str
) -> str:
    """A figure with an outline per (name, values, color), all with the same bins."""
    kept = [
        (name, color, [value for value in values if abs(value) < LARGEST])
        for name, values, color in groups
    ]
    every = [value for *_, values in kept for value in values]
    if not every:
        return ""
    low, high = _widened(min(every), max(every))
    edges = np.linspace(low, high, BINS + 1)
    counts = [np.histogram(values, edges)[0] for *_, values in kept]
    x = Axis(low, high, LEFT, WIDTH - RIGHT)
    y = Axis(0, 1.05 * max(int(one.max()) for one in counts), HEIGHT - BOTTOM, TOP)
    keys = dict[str, str]()
    shapes = list[str]()
    for (name, color, values), heights in zip(kept, counts, strict=True):
        if values:
            outline = [*zip(np.repeat(edges, 2), [0, *np.repeat(heights, 2), 0], strict=True)]
            keys[name] = f"{color} bars"
            shapes.append(f'<polygon class="{color} bars" points="{_corners(outline, x, y)}"/>')
    return _figure(title, keys, [], [_axes(x, y, x_label, "count"), *shapes])


def plain(value: float) -> str:
    """A number in a short form."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Axis:
    """Maps the values of one axis to pixels; `low` is at the pixel `start`."""

    low: float
    high: float
    start: float
    end: float
    is_whole: bool = False  # whether ticks are whole numbers, as for steps

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self) -> list[tuple[float, str]]:
        """A few round numbers with distinct labels."""
        rough = max((self.high - self.low) / 5, self.is_whole)
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(size * unit for size in (1, 2, 5, 10) if size * unit >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        labels = (f"{index * step:,.12g}" for index in range(first, last + 1))
        return [(float(label.replace(",", "")), label) for label in labels]


def _widened(low: float, high: float) -> tuple[float, float]:
    """The range with a margin at both ends; never empty."""
    largest = max(abs(low), abs(high))
    margin = (high - low) * 0.05
    if high - low <= largest * 1e-6:
        margin = 0.1 * largest or 1e-6
    return low - margin, high + margin


def _smoothed(points: Sequence[Point]) -> tuple[Sequence[Point], int]:
    """The centered moving mean of a noisy curve and its window; a smooth curve has window 0."""
    heights = np.array([value for _, value in points])
    if len(points) < SMOOTHED or np.abs(np.diff(heights)).sum() <= NOISY * np.ptp(heights):
        return points, 0
    window = max(5, len(points) // 20 | 1)
    # A convolution, because a running sum would lose all digits after a single huge value.
    ones = np.ones(window)
    means = np.convolve(heights, ones, "same") / np.convolve(np.ones(len(heights)), ones, "same")
    return [(x, value) for (x, _), value in zip(points, means.tolist(), strict=True)], window


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most MAX_POINTS points: the highest and the lowest of each interval."""
    if len(points) <= MAX_POINTS:
        return points
    size, kept = math.ceil(2 * len(points) / MAX_POINTS), list[Point]()
    for start in range(0, len(points), size):
        part = sorted(points[start : start + size], key=lambda point: point[1])
        kept += sorted({part[0], part[-1]})
    return kept


def _corners(points: Sequence[Point], x: Axis, y: Axis) -> str:
    return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)


def _polyline(kind: str, points: Sequence[Point], x: Axis, y: Axis) -> str:
    return f'<polyline class="{kind}" points="{_corners(points, x, y)}"/>'


def _axes(x: Axis, y: Axis, x_label: str, y_label: str) -> str:
    """The grid lines, tick labels and axis labels."""
    bottom, parts = HEIGHT - BOTTOM, []
    for tick, label in y.ticks():
        at, kind = f"{y(tick):.1f}", "zero" if tick == 0 else "rule"
        parts.append(
            f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
            f'<text class="y-tick" x="{LEFT - 6}" y="{at}">{label}</text>'
        )
    for tick, label in x.ticks():
        parts.append(f'<text class="x-tick" x="{x(tick):.1f}" y="{bottom + 15}">{label}</text>')
    middle, half = (LEFT + WIDTH - RIGHT) / 2, (TOP + bottom) / 2
    parts.append(f'<text class="x-tick" x="{middle}" y="{HEIGHT - 4}">{escape(x_label)}</text>')
    if y_label:
        turned = f'x="12" y="{half}" transform="rotate(-90 12 {half})"'
        parts.append(f'<text class="x-tick" {turned}>{escape(y_label)}</text>')
    return "".join(parts)


def _figure(
    title: str, keys: Mapping[str, str], notes: Sequence[str], shapes: Sequence[str]
) -> str:
    named = [
        f'<span class="key"><i class="{kind}"></i>{escape(name)}</span>'
        for name, kind in keys.items()
    ]
    named += [f'<span class="key">{note}</span>' for note in notes]
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{''.join(named)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(shapes)}</svg></figure>"
    )
