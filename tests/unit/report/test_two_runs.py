"""Two runs are compared row by row."""

import polars as pl
import pytest

from align.schemas.errors import UsageError
from align.stages.report.intervals import mcnemar
from align.stages.report.two_runs import ALPHA, compare, measure_of
from support.refusals import refuses


def table(rows, roles=("chosen", "rejected"), prompts=None):
    """A table of completions; each row has an id and the reward of each of its sides."""
    lines = [
        {
            "row": number,
            "row_id": name,
            "prompt_key": (prompts or {}).get(name, name),
            "role": role,
            "tokens": 10 + number,
            "logp": reward * 10 - 3,
            "reference_logp": -3.0,
            "log_ratio": reward * 10,
            "reward": float(reward),
        }
        for number, (name, *rewards) in enumerate(rows)
        for role, reward in zip(roles, rewards, strict=True)
        if reward is not None
    ]
    return pl.DataFrame(lines)


# Margins of A: 1, -1, 2, 0; of B: 3, 1, -1, 1.
FIRST = table([("a", 1, 0), ("b", 0, 1), ("c", 2, 0), ("d", 1, 1)])
SECOND = table([("d", 2, 1), ("c", 0, 1), ("b", 1, 0), ("a", 3, 0)])


def test_rows_are_matched_by_their_ids_and_a_tie_is_half_right():
    found = compare(FIRST, SECOND)
    assert (found.accuracy.first, found.accuracy.second) == ((1 + 0 + 1 + 0.5) / 4, 3 / 4)
    assert found.gained == ("b",)
    assert found.lost == ("c",)
    assert (found.correct_in_both, found.left_out, found.p_value) == (1, 0, mcnemar(1, 1))
    assert found.margin.name == "log_ratio"
    assert (found.margin.first, found.margin.second) == pytest.approx((10 * 2 / 4, 10 * 4 / 4))
    assert found.margin.low < 5 < found.margin.high


def test_labels_of_a_row_are_compared_as_its_pair_is():
    labels = table(
        [("a", 3, 0), ("b", 1, 0), ("c", 0, 1), ("d", 2, 1)], ("desirable", "undesirable")
    )
    assert compare(FIRST, labels) == compare(FIRST, SECOND)


def test_a_label_alone_is_right_on_its_side_of_zero():
    one = table([("a", 1), ("b", -1)], ("desirable",))
    other = pl.concat([one, table([("c", -2)], ("undesirable",))])
    found = compare(other, other)
    assert (found.accuracy.first, found.accuracy.rows) == (2 / 3, 3)


def test_a_row_that_one_run_lacks_or_has_half_of_is_left_out():
    half = table([("a", 1, 0), ("b", None, 1), ("x", 1, 0)])
    found = compare(FIRST, half)
    assert (found.accuracy.rows, found.left_out) == (1, 4)
    infinite = table([("a", float("inf"), 0), ("b", 1, 0)])
    assert compare(FIRST, infinite).accuracy.rows == 1
    with pytest.raises(UsageError):
        compare(FIRST, table([("x", 1, 0)]))


def test_a_run_without_a_reference_is_compared_by_its_log_probs():
    bare = SECOND.drop("reference_logp", "log_ratio")
    found = compare(FIRST, bare)
    assert (found.margin.name, found.accuracy) == ("logp", compare(FIRST, SECOND).accuracy)
    scores = FIRST.drop("logp", "reference_logp", "log_ratio").with_columns(policy_score="reward")
    assert compare(scores, scores).margin is None


def test_two_losses_are_compared_by_what_they_have_in_common():
    bare = SECOND.drop("reference_logp", "log_ratio")
    assert measure_of([FIRST, SECOND], ["b r", "b r"]) == "reward"
    assert measure_of([FIRST, SECOND], ["b r", "b r/n"]) == "log_ratio"
    assert measure_of([FIRST, bare], ["b r", "lam m"]) == "logp"
    found = compare(FIRST.with_columns(reward=0.0), SECOND, "log_ratio")
    assert found.accuracy == compare(FIRST, SECOND).accuracy


def test_a_clear_difference_is_told():
    names = [f"r{number:03}" for number in range(120)]
    prompts = {name: name[:3] for name in names}
    wrong = table([(name, 0, 1) for name in names], prompts=prompts)
    sides = [(name, 1, 0) if number % 3 else (name, 0, 1) for number, name in enumerate(names)]
    better = table(sides, prompts=prompts)
    found = compare(wrong, better)
    assert found.p_value < ALPHA
    assert (len(found.gained), len(found.lost)) == (80, 0)
    assert found.accuracy.low > 0.5
    reversed_ = compare(better, wrong)
    assert (reversed_.accuracy.low, reversed_.gained) == (-found.accuracy.high, ())


def test_candidates_have_no_good_and_no_bad_side():
    with refuses(UsageError, "candidate"):
        compare(table([("a", 1)], ("candidate",)), FIRST)


def test_a_prompt_counts_once_however_many_of_its_rows_flip():
    names = [f"r{number}" for number in range(24)]
    prompts = {name: f"p{number % 3}" for number, name in enumerate(names)}
    rows = [[(name, one, 0) for name in names] for one in (-1, 1)]
    assert compare(*map(table, rows)).p_value < ALPHA
    found = compare(*(table(one, prompts=prompts) for one in rows))
    assert found.p_value == mcnemar(0, 3) > ALPHA
    assert (found.prompts_lost, found.prompts_gained) == (0, 3)


def test_the_run_that_is_right_on_more_prompts_is_ahead_however_many_rows_one_prompt_has():
    """12 prompts of one row against one of 20: chance is 2 (1 + 13) / 2 ** 13."""
    names = [f"r{number:02}" for number in range(32)]
    prompts = dict.fromkeys(names[12:], "one")
    of_few = [(name, 0, 1) if name in prompts else (name, 1, 0) for name in names]
    of_many = [(name, 1, 0) if name in prompts else (name, 0, 1) for name in names]
    few, many = table(of_few, prompts=prompts), table(of_many, prompts=prompts)
    found = compare(few, many)
    assert (len(found.lost), len(found.gained)) == (12, 20)
    assert (found.prompts_lost, found.prompts_gained) == (12, 1)
    assert found.p_value == 28 / 8192


def test_log_probs_alone_tell_nothing_of_a_label_alone():
    one = pl.concat(
        [table([("a", 1), ("b", 1)], ("desirable",)), table([("b", 0), ("c", 1)], ("undesirable",))]
    ).drop("reference_logp", "log_ratio")
    assert compare(one, one, "logp").accuracy.rows == 1
    alone = one.filter(pl.col("row_id") != "b")
    with refuses(UsageError, "reference"):
        compare(alone, alone, "logp")


def test_scores_and_log_probs_have_nothing_in_common():
    scores = FIRST.drop("logp", "reference_logp", "log_ratio").with_columns(policy_score="reward")
    with pytest.raises(UsageError):
        measure_of([scores, SECOND], ["s", "b r"])
