"""Each warning is found where it was planted, and none where all is well."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from align.stages.report.run_warnings import FEWEST_LINES, WARNINGS, Measurements, find_warnings

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
}


@pytest.mark.parametrize("name", WARNINGS)
def test_each_warning_is_found_where_it_was_planted(name):
    assert all(find_warnings(PLANTED[name](clean(seed))).get(name) for seed in range(3))


def test_trainings_that_are_well_raise_no_alarm():
    assert [find_warnings(clean(seed)) for seed in range(5)] == [{}] * 5


def test_of_a_short_run_nothing_is_told():
    run = clean(0, steps=FEWEST_LINES - 1)
    few = replace(run, tables={step: rows.head(10) for step, rows in run.tables.items()})
    assert find_warnings(few) == find_warnings(Measurements({})) == {}
    for of_rows in ("displacement", "length", "past its best"):
        assert find_warnings(PLANTED[of_rows](few)) == {}


@pytest.mark.parametrize(
    ("planted", "columns"), [("displacement", ()), ("saturation", ("log_ratio", "reward"))]
)
def test_single_labels_warn_of_what_they_can_tell_and_spoil_no_other_warning(planted, columns):
    """Without a reference, as csft has none, single labels are neither right nor wrong."""
    run = PLANTED[planted](clean(3))
    single = {
        step: rows.filter((pl.col("row") % 2 == 0) == (pl.col("role") == "chosen")).drop(columns)
        for step, rows in run.tables.items()
    }
    assert [*find_warnings(replace(run, tables=single))] == [planted]


def test_numbers_in_words_are_those_of_the_rows():
    lengths = np.array([[9, 5]] * 40 + [[5, 9]] * 40)
    start, none = np.full((80, 2), -50.0), np.zeros((80, 2))
    right = np.array([[1.0, 0.0]] * 36 + [[0.0, 1.0]] * 4 + [[1.0, 0.0]] * 20 + [[0.0, 1.0]] * 20)
    tables = {0: table(lengths, start, none), 9: table(lengths, start, right - 3)}
    found = find_warnings(Measurements({}, {}, tables))
    assert "90%" in found["length"]  # 36 of 40 where the chosen side is longer
    assert "50%" in found["length"]  # 20 of 40 where it is shorter
    # chosen: 56 of 80 fall by 2 and 24 by 3 nats
    assert f"{(56 * 2 + 24 * 3) / 80:.2f} nats" in found["displacement"]


def test_an_end_that_is_worse_on_one_prompt_alone_is_not_past_its_best():
    """Of 32 rows the last 20 are of one prompt; they are right at step 3, the others at the end."""
    sides, none = np.full((32, 2), 9), np.zeros((32, 2))
    is_shared = np.arange(32)[:, None] >= 12
    prompt = pl.when(pl.col("row") < 12).then("prompt_key").otherwise(pl.lit("one"))
    tables = {
        step: table(sides, none, np.where(is_right, [1.0, 0.0], [0.0, 1.0]))
        for step, is_right in ((3, is_shared), (9, ~is_shared))
    }
    assert "past its best" not in find_warnings(
        Measurements(
            {}, {}, {at: one.with_columns(prompt_key=prompt) for at, one in tables.items()}
        )
    )


def test_the_order_of_rows_changes_no_figure():
    run = PLANTED["displacement"](clean(3))
    found = []
    for seed in range(5):
        shuffled = {
            step: rows.sample(fraction=1, shuffle=True, seed=seed)
            for step, rows in run.tables.items()
        }
        found.append(find_warnings(replace(run, tables=shuffled)))
    assert "displacement" in found[0]
    assert found == found[:1] * 5
