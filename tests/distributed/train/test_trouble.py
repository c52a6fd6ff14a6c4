"""Something goes wrong on the last rank, and every rank reacts alike."""

import math

import pytest

from support.training_ranks import TROUBLE, WRONG


@pytest.mark.parametrize("kind", TROUBLE)
def test_a_step_that_is_not_finite_leaves_every_bit_and_every_rank_refuses_it(spread, kind):
    before, *after = spread[0][f"nonfinite/{kind}"]["digests"]
    for step, digest in enumerate(after[:8], 1):
        assert (digest == before) == (step in WRONG)
        before = digest
    assert after[8] == before  # as step 9 ends the run, so it was not recorded
    for rank in spread:
        seen = rank[f"nonfinite/{kind}"]
        assert [step for step, _ in seen["refused"]] == WRONG
        assert seen["error"].startswith("6: Step 9: ")  # with exit code 6
        logged = [step for step, loss in enumerate(seen["losses"], 1) if not math.isfinite(loss)]
        assert logged == ([] if "gradient" in kind else WRONG[:-1])


@pytest.mark.parametrize("kind", TROUBLE)
def test_the_row_with_the_wrong_number_is_named_and_of_a_wrong_gradient_all_of_its_step(
    spread, kind
):
    first, last = seen = [rank[f"nonfinite/{kind}"] for rank in spread]
    if "gradient" in kind:
        for number, step in enumerate(WRONG):
            named = [row for rank in seen for row in rank["refused"][number][1]]
            assert len(named) == len(set(named)) == first["rows"][step - 1]
        return
    of_kind = "firsts" if kind == "loss" else "first_mismatched"
    assert last["refused"] == [[step, last[of_kind][step - 1]] for step in WRONG]
    assert [rows for _, rows in first["refused"]] == [[]] * len(WRONG)


def test_a_reason_of_one_rank_stops_all_and_a_signal_comes_before_the_end_of_time(spread):
    for rank in spread:
        seen = rank["stop reasons"]
        assert [seen[name] for name in ("signal", "time", "none")] == ["signal", "time", None]
        assert seen["in the middle"] == [3, "signal", [3]]  # steps done, saves


def test_a_rank_that_cannot_read_ends_all_and_says_why(spread):
    for source in ("steps", "held_out"):
        first, last = [rank["stop reasons"][source] for rank in spread]
        assert last == "part-3 is damaged"
        assert first
        assert first != last
