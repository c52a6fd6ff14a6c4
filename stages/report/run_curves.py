"""The charts of a run's metrics: which stand together, and what is marked in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .charts import Best, Metrics, Series, chart

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
# Their zero, or the shape of their course, is what one looks for.
LINEAR = {"lr", "padding", "rewards/accuracies", "rewards/ties"}
BEST: Mapping[str, Best] = {"loss": "lowest"}
FEWEST_TO_CHOOSE = 3  # evaluations: of two, one is the beginning


def learning_curves(learned: Metrics, held_out: Metrics, best: Mapping[str, Best] = BEST) -> str:
    """The charts of loss, rewards and log-probs; `best` says which held-out points are marked."""
    return "".join(_charts(CHARTS, learned, held_out, best))


def further_curves(learned: Metrics, held_out: Metrics, best: Mapping[str, Best] = BEST) -> str:
    """The charts of speed, memory, and other metrics of a method."""
    known = {name for names in (*CHARTS.values(), *SPEED.values()) for name in names}
    others = sorted({*learned, *held_out} - known - LEFT_OUT)
    charts = {**SPEED, **{name: (name,) for name in others}}
    return "".join(_charts(charts, learned, held_out, best))


def _charts(
    charts: Mapping[str, Sequence[str]],
    learned: Metrics,
    held_out: Metrics,
    best: Mapping[str, Best],
) -> Iterator[str]:
    for title, names in charts.items():
        series: list[Series] = []
        there = [name for name in names if name in learned or name in held_out]
        for index, name in enumerate(there):
            said = name.rpartition("/")[2] if len(there) > 1 else ""
            kept, measured = (f"{said}, held out" if said else "held out"), held_out.get(name, ())
            marked = best.get(name, "") if len(measured) >= FEWEST_TO_CHOOSE else ""
            series.append(Series(said or "train", learned.get(name, ()), f"c{index}"))
            series.append(Series(kept, measured, f"c{index}", form="dots", best=marked))
        yield chart(title, series, x_label="step", may_be_log=LINEAR.isdisjoint(there))
