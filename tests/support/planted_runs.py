"""Made-up measurements of trainings: of clean ones, and with a fault planted in them."""

from dataclasses import replace

import numpy as np
import polars as pl

from align.stages.report.run_warnings import Measurements

STEPS, ROWS, BETA = 120, 200, 0.1


def curve(values):
    return [(step, float(value)) for step, value in enumerate(values, start=1)]


def clean(seed, steps=STEPS):
    """A training in which all is well, or nothing happens at all."""
    random = np.random.default_rng(seed)
    raw = np.linspace(0, 2, steps) + random.normal(0, 1, steps)
    learned = {
        "loss": curve(0.69 - 0.002 * np.arange(steps) + random.normal(0, 0.05, steps)),
        "rewards/accuracies": curve(np.linspace(0.5, 0.9, steps) + random.normal(0, 0.05, steps)),
        "kl/raw": curve(raw),
        "kl/clamped": curve(raw.clip(0)),
    }
    # Longer sides are chosen more often, and rows are right or wrong whatever their length is.
    lengths = random.integers(5, 60, (ROWS, 2))
    lengths[random.random(ROWS) < 0.4] += [30, 0]
    start = random.normal(-60, 20, (ROWS, 2))
    tables = {
        step: table(lengths, start, random.normal([0.3 * at, -0.3 * at], 3, (ROWS, 2)))
        for at, step in enumerate((0, 60, 120))
    }
    return Measurements(learned, {}, tables)


def table(lengths, start, ratios):
    """A table of pairs with these log-ratios."""
    lines = [
        {
            "row": row,
            "row_id": f"row {row:03}",
            "prompt_key": f"prompt {row:03}",
            "role": role,
            "tokens": lengths[row, side],
            "logp": start[row, side] + ratios[row, side],
            "reference_logp": start[row, side],
            "log_ratio": ratios[row, side],
            "reward": BETA * ratios[row, side],
        }
        for row in range(len(lengths))
        for side, role in enumerate(("chosen", "rejected"))
    ]
    return pl.from_dicts(lines)


def with_ratios(run, change, step=STEPS):
    """Other log-ratios at a step, by each completion's role, old ratio and lead in length."""
    rows = run.tables[step]
    other = pl.col("tokens").sum().over("row") - pl.col("tokens")
    ratios = change(pl.col("role") == "chosen", pl.col("log_ratio"), pl.col("tokens") - other)
    rows = rows.with_columns(log_ratio=ratios)
    rows = rows.with_columns(
        logp=pl.col("reference_logp") + pl.col("log_ratio"), reward=BETA * pl.col("log_ratio")
    )
    return replace(run, tables={**run.tables, step: rows})


def displaced(run):
    """Both sides fall, the rejected one further."""
    return with_ratios(run, lambda good, old, _: old - pl.when(good).then(4.0).otherwise(12.0))


def with_kl_at_zero(run):
    """The reference point falls, and is 0 after two thirds."""
    raw = [(step, value - max(0, step - 60) / 5) for step, value in run.learned["kl/raw"]]
    clamped = [(step, max(0.0, value)) for step, value in raw]
    return replace(run, learned={**run.learned, "kl/raw": raw, "kl/clamped": clamped})


def saturated(run):
    """All training rows are right in the last third."""
    ones = [(step, 1.0) for step in range(81, STEPS + 1)]
    early = run.learned["rewards/accuracies"][:80]
    return replace(run, learned={**run.learned, "rewards/accuracies": [*early, *ones]})


def by_length(run):
    """A token more is worth a tenth of a nat."""
    return with_ratios(run, lambda _good, old, longer: old + 0.1 * longer)


def fallen_back(run):
    """Good in the middle, and as by chance at the end."""
    run = with_ratios(run, lambda good, old, _: old + pl.when(good).then(6).otherwise(-6), 60)
    return with_ratios(run, lambda good, old, _: old + pl.when(good).then(-1).otherwise(1))


PLANTED = {
    "displacement": displaced,
    "KL at 0": with_kl_at_zero,
    "saturation": saturated,
    "length": by_length,
    "past its best": fallen_back,
    "clean": lambda run: run,
}
