"""What goes wrong on the last rank, and what each rank makes of it."""

import math

import pytest

from support.training_trouble import KINDS

WRONG = [2, 4, 5, 7, 8, 9]  # the steps whose answers are spoiled; 3 in a row are too many


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request, alone, spread):
    """What each rank saw; only the last one was given anything wrong, or had a reason to stop."""
    return alone if request.param == 1 else spread


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_finite_leaves_every_bit_of_the_weights(ranks, kind):
    before, *after = ranks[0][f"nonfinite {kind}"]["digests"]
    for step, digest in enumerate(after[:8], 1):
        assert (digest == before) == (step in WRONG)
        before = digest
    assert after[8] == before  # as step 9 ends the run, so it was not recorded


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_refuses_the_same_steps_and_ends_after_the_third_in_a_row(ranks, kind):
    for rank in ranks:
        seen = rank[f"nonfinite {kind}"]
        assert [step for step, _ in seen["refused"]] == WRONG
        assert seen["error"].startswith("6: Step 9: ")  # with exit code 6
        assert "3 times in a row" in seen["error"]
        is_loss = "gradient" not in kind
        told = [step for step, loss in enumerate(seen["losses"], 1) if not math.isfinite(loss)]
        assert told == (WRONG[:-1] if is_loss else [])


@pytest.mark.parametrize(
    ("kind", "named"), [("loss", "firsts"), ("mismatched", "first_mismatched")]
)
def test_only_the_row_with_the_wrong_loss_or_mismatched_branch_is_named(ranks, kind, named):
    *others, last = [rank[f"nonfinite {kind}"] for rank in ranks]
    assert last["refused"] == [[step, last[named][step - 1]] for step in WRONG]
    for rank in others:
        assert [rows for _, rows in rank["refused"]] == [[]] * len(WRONG)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "gradient" in kind])
def test_of_a_wrong_gradient_all_rows_of_the_step_are_named(ranks, kind):
    seen = [rank[f"nonfinite {kind}"] for rank in ranks]
    for number, step in enumerate(WRONG):
        named = [row for rank in seen for row in rank["refused"][number][1]]
        assert len(named) == len(set(named)) == seen[0]["rows"][step - 1]


def test_a_reason_of_one_rank_stops_all_and_a_signal_comes_before_the_end_of_time(ranks):
    for rank in ranks:
        seen = rank["stop reasons"]
        asked = {name: seen[name] for name in ("signal", "time", "both", "none")}
        assert asked == {"signal": "signal", "time": "time", "both": "signal", "none": None}
        assert seen["in the middle"] == [3, 3, "signal", [3]]  # steps done, cursor, saves


@pytest.mark.parametrize("where", ["failure", "failed evaluation"])
def test_a_rank_that_cannot_read_ends_all_and_says_why(ranks, where):
    *others, last = [rank["stop reasons"][where] for rank in ranks]
    assert last == "part-3 is damaged"
    for message in others:
        assert message == "Another rank could not read its rows; it says which."
