"""Curves, histograms and scatter plots as SVG, without scripts or libraries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ...schemas.safe_text import escape

Point = tuple[float, float]
Metrics: TypeAlias = "Mapping[str, Sequence[Point]]"  # by name, (step, value) each
Form = Literal["line", "dots", "cloud"]

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 36
MOST_POINTS = 400
BINS = 28
LARGEST = 1e300


@dataclass(frozen=True)
class Series:
    """A series of points; `color` is one of the page's classes, c0 to c7."""

    name: str
    points: Sequence[Point]
    color: str
    form: Form = "line"  # dots: a line with marked points; cloud: no line


@dataclass(frozen=True)
class Values:
    """Numbers of one kind, for a histogram."""

    name: str
    values: Sequence[float]
    color: str


def chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str = "") -> str:
    """A figure with one or more series; empty if none has a point."""
    shown = [replace(one, points=list(filter(_can_be_drawn, one.points))) for one in series]
    shown = [one for one in shown if one.points]
    if not shown:
        return ""
    axes = _Axes.around([point for one in shown for point in one.points])
    drawn = "".join(_drawn(one, axes) for one in shown)
    keys = [(one.name, f"{one.color} {one.form}") for one in shown]
    return _figure(title, keys, axes.drawn(x_label, y_label) + drawn)


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
    low, high = _widened(min(every), max(every))
    width = (high - low) / BINS
    counts = [_counted(group.values, low, width) for group in shown]
    axes = _Axes(low, high, 0, max(map(max, counts)) * 1.05)
    drawn = "".join(
        _outline(group.color, heights, low, width, axes)
        for group, heights in zip(shown, counts, strict=True)
    )
    keys = [(group.name, f"{group.color} bars") for group in shown]
    return _figure(title, keys, axes.drawn(x_label, "count") + drawn)


def plain(value: float) -> str:
    """A number in a short readable form."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class _Axes:
    """The marks between the edges of the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @staticmethod
    def around(points: Sequence[Point]) -> _Axes:
        x_low, x_high = _ends([x for x, _ in points])
        if x_low == x_high:
            x_low, x_high = x_low - 1, x_high + 1
        y_low, y_high = _widened(*_ends([y for _, y in points]))
        return _Axes(x_low, x_high, y_low, y_high)

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        fraction = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * fraction

    def drawn(self, x_label: str, y_label: str) -> str:
        """Grid lines, tick labels of both axes, and axis labels."""
        bottom = HEIGHT - BOTTOM
        parts = []
        for tick, said in _ticks(self.y_low, self.y_high):
            y = f"{self.y(tick):.1f}"
            kind = "zero" if tick == 0 else "rule"
            parts.append(
                f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
            )
            parts.append(f'<text class="y-tick" x="{LEFT - 6}" y="{y}">{said}</text>')
        for tick, said in _ticks(self.x_low, self.x_high):
            at = f'x="{self.x(tick):.1f}" y="{bottom + 15}"'
            parts.append(f'<text class="x-tick" {at}>{said}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="x-tick" x="{middle}" y="{HEIGHT - 4}">{escape(x_label)}</text>')
        if y_label:
            half = (TOP + bottom) / 2
            turned = f"rotate(-90 12 {half})"
            at = f'x="12" y="{half}" transform="{turned}"'
            parts.append(f'<text class="x-tick" {at}>{escape(y_label)}</text>')
        return "".join(parts)


def _drawn(series: Series, axes: _Axes) -> str:
    points = series.points if series.form == "cloud" else _thinned(series.points)
    at = [(axes.x(x), axes.y(y)) for x, y in points]
    parts = []
    if series.form != "cloud":
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline class="{series.color} {series.form}" points="{path}"/>')
    if series.form != "line" or len(at) == 1:
        kind = "cloud" if series.form == "cloud" else "dot"
        for (x, y), (x_value, y_value) in zip(at, points, strict=True):
            tip = escape(f"{series.name}: {plain(y_value)} at {plain(x_value)}")
            parts.append(
                f'<circle class="{series.color} {kind}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{tip}</title></circle>"
            )
    return "".join(parts)


def _outline(color: str, heights: Sequence[int], low: float, width: float, axes: _Axes) -> str:
    floor = axes.y(0)
    corners = [f"{axes.x(low):.1f},{floor:.1f}"]
    for index, height in enumerate(heights):
        y = axes.y(height)
        for edge in (index, index + 1):
            corners.append(f"{axes.x(low + edge * width):.1f},{y:.1f}")
    corners.append(f"{axes.x(low + len(heights) * width):.1f},{floor:.1f}")
    return f'<polygon class="{color} bars" points="{" ".join(corners)}"/>'


def _figure(title: str, keys: Sequence[tuple[str, str]], drawing: str) -> str:
    named = "".join(
        f'<span class="key"><i class="{kind}"></i>{escape(name)}</span>' for name, kind in keys
    )
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{named}</figcaption>"
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


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _widened(low: float, high: float) -> tuple[float, float]:
    """The range with a margin at both ends; never empty."""
    margin = (high - low) * 0.05
    least = max(abs(low), abs(high)) * 1e-6 or 1e-6
    if high - low < least:
        return low - max(least, abs(low) * 0.1), high + max(least, abs(high) * 0.1)
    return low - margin, high + margin


def _can_be_drawn(point: Point) -> bool:
    """Whether lengths between such points are still numbers."""
    return all(abs(value) < LARGEST for value in point)


def _ticks(low: float, high: float) -> Iterator[tuple[float, str]]:
    """A few round numbers with distinct labels."""
    rough = (high - low) / 5
    power = math.floor(math.log10(rough))
    step = next(size * 10.0**power for size in (1, 2, 5, 10) if size * 10.0**power >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    for index in range(first, last + 1):
        tick = float(f"{index * step:.12g}")
        yield tick, _written(tick, decimals, math.log10(max(abs(low), abs(high)) / step))


def _written(tick: float, decimals: int, digits: float) -> str:
    if tick == 0:
        return "0"
    if decimals > 6 or abs(tick) >= 1e6:
        mantissa, _, power = f"{tick:.{max(0, math.ceil(digits))}e}".partition("e")
        kept = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{kept}e{int(power)}"
    return f"{tick:,.{decimals}f}"


CHARTS = {
    "Loss": ("loss",),
    "Accuracy": ("rewards/accuracies", "rewards/ties"),
    "Rewards": ("rewards/chosen", "rewards/rejected"),
    "Margin": ("rewards/margins",),
    "KL, mean of mismatched log-ratios": ("kl/raw", "kl/clamped"),
    "Log-probs": ("logps/chosen", "logps/rejected"),
    "Gradient norm, before clipping": ("grad_norm",),
    "Learning rate": ("lr",),
}
SPEED = {
    "Tokens a second": ("speed/tokens_per_second",),
    "Seconds a step": ("speed/step_seconds", "speed/data_wait_seconds"),
    "Peak memory, MiB": ("memory/peak_mib",),
    "Padding, share of tokens": ("padding",),
}
LEFT_OUT = {"epoch", "tokens", "speed/rows_per_second", "step_applied"}


def learning_curves(learned: Metrics, held_out: Metrics) -> str:
    """The charts of loss, rewards and log-probs."""
    return "".join(_chart(title, names, learned, held_out) for title, names in CHARTS.items())


def further_curves(learned: Metrics, held_out: Metrics) -> str:
    """The charts of speed, memory, and other metrics of a method."""
    known = {name for names in (*CHARTS.values(), *SPEED.values()) for name in names}
    others = sorted({*learned, *held_out} - known - LEFT_OUT)
    charts = {**SPEED, **{name: (name,) for name in others}}
    return "".join(_chart(title, names, learned, held_out) for title, names in charts.items())


def _chart(title: str, names: Sequence[str], learned: Metrics, held_out: Metrics) -> str:
    series = _all_series(
        [name for name in names if name in learned or name in held_out], learned, held_out
    )
    return chart(title, list(series), x_label="step")


def _all_series(names: Sequence[str], learned: Metrics, held_out: Metrics) -> Iterable[Series]:
    for index, name in enumerate(names):
        said = name.rpartition("/")[2] if len(names) > 1 else ""
        color = f"c{index}"
        yield Series(said or "train", learned.get(name, ()), color)
        kept = f"{said}, held out" if said else "held out"
        yield Series(kept, held_out.get(name, ()), color, form="dots")
