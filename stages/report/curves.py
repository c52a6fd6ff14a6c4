"""Which curves a run's metrics make: what belongs together stands in one chart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .charts import Series, chart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .charts import Point

    Metrics = Mapping[str, Sequence[Point]]  # by name, (step, value) each

CHARTS = {
    "Loss": ("loss",),
    "Accuracy": ("rewards/accuracies",),
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
DRAWN_NOWHERE = {"epoch", "tokens", "speed/rows_per_second"}
LEFT_OUT = {*DRAWN_NOWHERE, "step_applied"}


def learning_curves(learned: Metrics, held_out: Metrics) -> str:
    """What tells whether a run learns what it should."""
    return "".join(_chart(title, names, learned, held_out) for title, names in CHARTS.items())


def further_curves(learned: Metrics, held_out: Metrics) -> str:
    """Speed, memory, and whatever else a method reports, a chart each."""
    known = {name for names in (*CHARTS.values(), *SPEED.values()) for name in names}
    others = sorted({*learned, *held_out} - known - LEFT_OUT)
    charts = {**SPEED, **{name: (name,) for name in others}}
    return "".join(_chart(title, names, learned, held_out) for title, names in charts.items())


def _chart(title: str, names: Sequence[str], learned: Metrics, held_out: Metrics) -> str:
    series = _all_series(
        [name for name in names if name in learned or name in held_out], learned, held_out
    )
    return chart(title, list(series), across="step")


def _all_series(names: Sequence[str], learned: Metrics, held_out: Metrics) -> Iterable[Series]:
    for index, name in enumerate(names):
        said = name.rpartition("/")[2] if len(names) > 1 else ""
        color = f"c{index}"
        yield Series(said or "learned from", learned.get(name, ()), color)
        kept = f"{said}, held out" if said else "held out"
        yield Series(kept, held_out.get(name, ()), color, form="dots")
