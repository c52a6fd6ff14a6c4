"""The charts of a run: its metrics by step, and the values of its held-out completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..storage.run.checkpoints import best_first, best_metric
from .charts import BINS, Curves, Series, chart, histogram, plain
from .eval_table import BAD, COLUMNS, GOOD, REWARD, kind_of

if TYPE_CHECKING:
    import polars as pl

LEARNING = {
    "Loss": ("loss",),
    "Accuracy": ("rewards/accuracies", "rewards/ties"),
    "Rewards": ("rewards/chosen", "rewards/rejected"),
    "Margin": ("rewards/margins",),
    "KL, mean log-ratio of KL completions": ("kl/raw", "kl/clamped"),
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
COLORS = 8  # of the page


def further(*curves: Curves) -> dict[str, Sequence[str]]:
    """The charts of speed, memory and a method's other metrics, by title."""
    known = {name for names in (*LEARNING.values(), *SPEED.values()) for name in names}
    others = sorted({name for one in curves for name in one} - known - LEFT_OUT)
    return {**SPEED, **{name: (name,) for name in others}}


def curves_of(
    charts: Mapping[str, Sequence[str]],
    learned: Curves,
    held_out: Mapping[str, Curves],
    best: str,
) -> str:
    """The charts with these titles and metrics, each for training steps and held-out sets.

    A ring marks the best evaluation by `best`, a metric as in train.best.
    """
    figures = []
    for title, metrics in charts.items():
        series: list[Series] = []
        every = (learned, *held_out.values())
        there = [name for name in metrics if any(name in one for one in every)]
        for index, name in enumerate(there):
            short = name.rpartition("/")[2] if len(there) > 1 else ""
            series.append(Series(short or "train", learned.get(name, ()), f"c{index}"))
            for number, (of_set, curves) in enumerate(held_out.items()):
                color = f"c{(index + number * len(there)) % COLORS}"
                of_rows = ", ".join(filter(None, (short, of_set or "held out")))
                series.append(Series(of_rows, curves.get(name, ()), color, form="dots"))
                values = {int(step): value for step, value in curves.get(name, ())}
                metric = f"eval/{of_set}/{name}" if of_set else f"eval/{name}"
                # With two values, one of them is from before training.
                if best_metric(best).metric == metric and len(values) > 2:
                    step = best_first(values, best)[0]
                    mark = f"best: {plain(values[step])} at step {step:,}"
                    series.append(Series(mark, [(step, values[step])], color, form="ring"))
        figures.append(chart(title, series, x_label="step"))
    return "".join(figures)


def completion_charts(tables: Mapping[int, pl.DataFrame]) -> str:
    """The values of each completion in the last evaluation; margins also in the first."""
    last_step, first_step = max(tables), min(tables)
    last = tables[last_step]
    kind = kind_of(last.columns)
    assert kind, "read_samples refuses other tables"
    value, unit = COLUMNS[kind][-1], "score" if kind == "scores" else "nats"
    finite = last.filter(last[value].is_finite())
    by_role = {
        str(role): own for (role,), own in sorted(finite.partition_by("role", as_dict=True).items())
    }
    colors = {**dict.fromkeys(GOOD, "c0"), **dict.fromkeys(BAD, "c1")}
    values = [(role, own[value].to_list(), colors.get(role, "c2")) for role, own in by_role.items()]
    clouds = [
        Series(role, own.select("tokens", value).rows(), colors.get(role, "c2"), form="cloud")
        for role, own in by_role.items()
    ]
    margins = [(f"after step {last_step:,}", margins_of(last), "c2")]
    if first_step != last_step and margins[0][1]:
        first = margins_of(tables[first_step])
        # Margins that are all in one bin, as before training, would hide the others.
        if first and max(first) - min(first) > (max(margins[0][1]) - min(margins[0][1])) / BINS:
            margins.insert(0, (f"after step {first_step:,}", first, "c3"))
    left_out = len(last) - len(finite)
    without = f", without {left_out:,} that are not finite" if left_out else ""
    figures = (
        histogram(f"{kind.capitalize()} of completions{without}", values, x_label=unit),
        histogram("Margins of rewards within a row", margins, x_label="reward"),
        chart(f"{kind.capitalize()} by length", clouds, x_label="tokens", y_label=unit),
    )
    return "".join(figures)


def margins_of(samples: pl.DataFrame) -> list[float]:
    """Each row's mean reward of its good minus its bad completions, for rows with both."""
    if REWARD not in samples.columns:
        return []
    finite = samples.filter(samples[REWARD].is_finite())
    good, bad = (
        finite.filter(finite["role"].is_in(roles)).select("row", REWARD).group_by("row").mean()
        for roles in (GOOD, BAD)
    )
    both = good.join(bad, on="row", suffix="_bad").sort("row")
    return (both[REWARD] - both[f"{REWARD}_bad"]).to_list()
