"""The signs that a run may show: each is found where it was planted, and not in what is well."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from align.stages.report.signs import FEWEST_LINES, SIGNS, Evidence, look_for_signs

STEPS, ROWS, BETA = 120, 200, 0.1
RUNS = 60


def curve(values):
    return [(step, float(value)) for step, value in enumerate(values, start=1)]


def clean(seed, steps=STEPS):
    """The curves and tables of a training in which all is well, or nothing happens at all."""
    random = np.random.default_rng(seed)
    raw = np.linspace(0, 2, steps) + random.normal(0, 1, steps)
    learned = {
        "loss": curve(0.69 - 0.002 * np.arange(steps) + random.normal(0, 0.05, steps)),
        "rewards/accuracies": curve(np.linspace(0.5, 0.9, steps) + random.normal(0, 0.05, steps)),
        "rewards/chosen": curve(random.normal(0, 1, steps)),
        "rewards/rejected": curve(random.normal(0, 1, steps)),
        "kl/raw": curve(raw),
        "kl/clamped": curve(raw.clip(0)),
        "grad_norm": curve(random.lognormal(0, 0.4, steps)),
    }
    # Longer sides are chosen more often, and rows are right or wrong whatever their length is.
    lengths = random.integers(5, 60, (ROWS, 2))
    lengths[random.random(ROWS) < 0.4] += [30, 0]
    start = random.normal(-60, 20, (ROWS, 2))
    tables = {
        step: table(lengths, start, random.normal([0.3 * at, -0.3 * at], 3, (ROWS, 2)))
        for at, step in enumerate((0, 60, 120))
    }
    return Evidence(learned, {}, tables)


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


def with_curves(seen, **changed):
    named = {name.replace("__", "/"): values for name, values in changed.items()}
    return replace(seen, learned={**seen.learned, **named})


def with_ratios(seen, change, step=120):
    """Other log-ratios at a step, by each completion's role, old ratio and lead in length."""
    rows = seen.tables[step]
    other = pl.col("tokens").sum().over("row") - pl.col("tokens")
    ratios = change(pl.col("role") == "chosen", pl.col("log_ratio"), pl.col("tokens") - other)
    rows = rows.with_columns(log_ratio=ratios)
    rows = rows.with_columns(
        logp=pl.col("reference_logp") + pl.col("log_ratio"), reward=BETA * pl.col("log_ratio")
    )
    return replace(seen, tables={**seen.tables, step: rows})


def fallen_back(seen):
    """Good in the middle, and as by chance at the end."""
    seen = with_ratios(seen, lambda good, old, _: old + pl.when(good).then(6).otherwise(-6), 60)
    return with_ratios(seen, lambda good, old, _: old + pl.when(good).then(-1).otherwise(1))


PLANTED = {
    "displacement": lambda seen: with_ratios(
        seen, lambda good, old, _: old - pl.when(good).then(4.0).otherwise(12.0)
    ),
    "KL at 0": lambda seen: with_curves(
        seen, kl__clamped=[*seen.learned["kl/clamped"][:80], *((at, 0.0) for at in range(81, 121))]
    ),
    "saturation": lambda seen: with_curves(
        seen, rewards__accuracies=[*seen.learned["rewards/accuracies"][:80], *curve(np.ones(40))]
    ),
    "length": lambda seen: with_ratios(seen, lambda _good, old, longer: old + 0.1 * longer),
    "past its best": fallen_back,
}


def signs_of(seen):
    return {one.name for one in look_for_signs(seen)}


@pytest.mark.parametrize("sign", SIGNS)
def test_each_sign_is_found_where_it_was_planted(sign):
    for seed in range(20):
        seen = PLANTED[sign](clean(seed))
        (found,) = [one for one in look_for_signs(seen) if one.name == sign]
        assert found.said
        assert found.hint


def test_trainings_that_are_well_raise_no_alarm():
    every = [signs_of(clean(seed)) for seed in range(RUNS)]
    assert sum(map(bool, every)) <= 0.05 * RUNS


def test_of_a_short_run_nothing_is_told():
    seen = clean(0, steps=FEWEST_LINES - 1)
    few = replace(seen, tables={step: rows.head(10) for step, rows in seen.tables.items()})
    assert look_for_signs(few) == look_for_signs(Evidence({})) == ()
    for of_rows in ("displacement", "length", "past its best"):
        assert look_for_signs(PLANTED[of_rows](few)) == ()


def test_completions_of_a_single_label_can_tell_of_displacement():
    seen = clean(3)
    single = {
        step: rows.filter((pl.col("row") % 2 == 0) == (pl.col("role") == "chosen"))
        for step, rows in PLANTED["displacement"](seen).tables.items()
    }
    assert signs_of(replace(seen, tables=single)) == {"displacement"}


def test_numbers_in_words_are_those_of_the_rows():
    lengths = np.array([[9, 5]] * 40 + [[5, 9]] * 40)
    start, none = np.full((80, 2), -50.0), np.zeros((80, 2))
    right = np.array([[1.0, 0.0]] * 36 + [[0.0, 1.0]] * 4 + [[1.0, 0.0]] * 20 + [[0.0, 1.0]] * 20)
    seen = Evidence({}, {}, {0: table(lengths, start, none), 9: table(lengths, start, right - 3)})
    said = {one.name: one.said for one in look_for_signs(seen)}
    assert "90%" in said["length"]  # 36 of 40 where the chosen side is longer
    assert "50%" in said["length"]  # 20 of 40 where it is shorter
    # chosen: 56 of 80 fall by 2 and 24 by 3 nats
    assert f"{(56 * 2 + 24 * 3) / 80:.2f} nats" in said["displacement"]


def test_rows_that_cannot_tell_spoil_no_other_sign():
    """Single labels without a reference, as csft has them."""
    seen = PLANTED["saturation"](clean(1))
    kept = ["row", "row_id", "prompt_key", "role", "tokens", "logp"]
    single = {
        step: rows.filter((pl.col("row") % 2 == 0) == (pl.col("role") == "chosen")).select(kept)
        for step, rows in seen.tables.items()
    }
    assert signs_of(replace(seen, tables=single)) == {"saturation"}


def test_the_order_of_rows_changes_no_figure():
    seen = clean(3)
    fallen = {
        step: one.with_columns(pl.col("logp") - step / 10) for step, one in seen.tables.items()
    }
    grown = {
        step: one.with_columns(
            pl.col("log_ratio") + pl.when(pl.col("role") == "chosen").then(step / 20).otherwise(0)
        )
        for step, one in fallen.items()
    }
    told = {
        look_for_signs(
            replace(
                seen,
                tables={
                    step: one.sample(fraction=1, shuffle=True, seed=n)
                    for step, one in grown.items()
                },
            )
        )
        for n in range(5)
    }
    (found,) = told
    assert "displacement" in {one.name for one in found}
