"""The axes of a chart: where numbers stand in the drawing, and the round numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...schemas.safe_text import escape

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 36
MOST_TICKS = 6
LOG_FROM = 1000  # a highest value so many times the lowest: a linear axis shows no others


@dataclass(frozen=True)
class Scale:
    """Where the values of one axis stand, and its ticks with their labels."""

    low: float
    high: float
    start: float  # where the low end stands
    end: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value stands."""
        low, high, at = self.height(self.low), self.height(self.high), self.height(value)
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def height(self, value: float) -> float:
        """The number whose differences are lengths."""
        return math.log10(value) if self.is_log else value

    def value(self, height: float) -> float:
        """The value with this height."""
        return 10.0**height if self.is_log else height


def scale_of_x(values: Sequence[float]) -> Scale:
    """The whole width; of whole numbers, as steps are, the ticks are whole too."""
    low, high = min(values), max(values)
    edges = (LEFT, WIDTH - RIGHT)
    if low == high:
        return Scale(low - 1, high + 1, *edges, ticks=((low, plain(low)),))
    is_whole = all(value == int(value) for value in values)
    return Scale(low, high, *edges, ticks=tuple(_ticks(low, high, is_whole=is_whole)))


def scale_of_y(values: Sequence[float], *, may_be_log: bool = False) -> Scale:
    """The whole height with a margin; with log ticks where a linear axis would hide the rest."""
    low, high = min(values), max(values)
    edges = (HEIGHT - BOTTOM, TOP)
    if may_be_log and low > 0 and high / low >= LOG_FROM:
        margin = (high / low) ** 0.05
        low, high = low / margin, high * margin
        return Scale(low, high, *edges, ticks=tuple(_powers(low, high)), is_log=True)
    low, high = widened(low, high)
    return Scale(low, high, *edges, ticks=tuple(_ticks(low, high)))


def scale_between(low: float, high: float, *, is_x: bool) -> Scale:
    """A linear axis that ends exactly there."""
    edges = (LEFT, WIDTH - RIGHT) if is_x else (HEIGHT - BOTTOM, TOP)
    return Scale(low, high, *edges, ticks=tuple(_ticks(low, high)))


def drawn_axes(x: Scale, y: Scale, x_label: str, y_label: str) -> str:
    """Grid lines, tick labels of both axes, and axis labels."""
    bottom, parts = HEIGHT - BOTTOM, []
    for tick, said in y.ticks:
        at, kind = f"{y(tick):.1f}", "zero" if tick == 0 else "rule"
        parts.append(
            f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
            f'<text class="y-tick" x="{LEFT - 6}" y="{at}">{said}</text>'
        )
    for tick, said in x.ticks:
        parts.append(f'<text class="x-tick" x="{x(tick):.1f}" y="{bottom + 15}">{said}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="x-tick" x="{middle}" y="{HEIGHT - 4}">{escape(x_label)}</text>')
    if y_label:
        half = (TOP + bottom) / 2
        at = f'x="12" y="{half}" transform="rotate(-90 12 {half})"'
        parts.append(f'<text class="x-tick" {at}>{escape(y_label)}</text>')
    return "".join(parts)


def plain(value: float) -> str:
    """A number in a short readable form."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def widened(low: float, high: float) -> tuple[float, float]:
    """The range with a margin at both ends; never empty."""
    margin = (high - low) * 0.05
    least = max(abs(low), abs(high)) * 1e-6 or 1e-6
    if high - low < least:
        return low - max(least, abs(low) * 0.1), high + max(least, abs(high) * 0.1)
    return low - margin, high + margin


def _powers(low: float, high: float) -> Iterator[tuple[float, str]]:
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    for power in range(first, last + 1, 1 + (last - first) // MOST_TICKS):
        yield 10.0**power, plain(10.0**power) if -3 <= power < 6 else f"1e{power}"


def _ticks(low: float, high: float, *, is_whole: bool = False) -> Iterator[tuple[float, str]]:
    """A few round numbers with distinct labels."""
    rough = max((high - low) / 5, is_whole)
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
    if decimals > 5 or abs(tick) >= 1e6:
        mantissa, _, power = f"{tick:.{max(0, math.ceil(digits))}e}".partition("e")
        kept = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{kept}e{int(power)}"
    return f"{tick:,.{decimals}f}"
