"""How a column of numbers is spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Spread:
    """Quantiles lie between neighbours by linear interpolation; all is 0 where nothing is."""

    min: float
    p1: float
    p50: float
    p90: float
    p99: float
    max: float
    mean: float


def spread_of(column: pl.Series) -> Spread:
    """The spread of a column without nulls."""
    if column.is_empty():
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    ranked = column.sort()  # once, instead of once per quantile
    return Spread(
        min=_quantile(ranked, 0.0),
        p1=_quantile(ranked, 0.01),
        p50=_quantile(ranked, 0.5),
        p90=_quantile(ranked, 0.9),
        p99=_quantile(ranked, 0.99),
        max=_quantile(ranked, 1.0),
        mean=float(ranked.sum()) / len(ranked),
    )


def _quantile(ranked: pl.Series, share: float) -> float:
    value = ranked.quantile(share, "linear")
    assert value is not None, "a column that is not empty has every quantile"
    return float(value)
