"""NaN and infinity: no update is made from them, and their rows are reported."""

import math

import pytest

WRONG = [2, 4, 5, 7, 8, 9]  # the steps whose answers are spoiled; 3 in a row are too many
LOSS_KINDS = ("loss", "mismatched")
GRADIENT_KINDS = ("gradient", "infinite gradient")
KINDS = (*LOSS_KINDS, *GRADIENT_KINDS)


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def spoiled_ranks(request, alone, spread):
    """What each rank saw; only the last rank is given anything wrong."""
    seen = alone if request.param == 1 else spread
    return [rank["nonfinite"] for rank in seen]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_finite_leaves_every_bit_of_the_weights(spoiled_ranks, kind):
    before, *after = spoiled_ranks[0][kind]["digests"]
    for step, digest in enumerate(after[:8], 1):
        assert (digest == before) == (step in WRONG)
        before = digest
    assert after[8] == before  # as step 9 ends the run, so it was not recorded


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_refuses_the_same_steps(spoiled_ranks, kind):
    for rank in spoiled_ranks:
        assert [step for step, _ in rank[kind]["refused"]] == WRONG


@pytest.mark.parametrize("kind", KINDS)
def test_the_third_in_a_row_ends_the_run_with_exit_code_6_on_every_rank(spoiled_ranks, kind):
    for rank in spoiled_ranks:
        assert rank[kind]["error"].startswith("6: Step 9: the loss or a gradient was NaN")
        assert "3 times in a row" in rank[kind]["error"]


def test_the_loss_tells_when_it_was_the_loss(spoiled_ranks):
    def steps(kind):
        losses = enumerate(spoiled_ranks[0][kind]["losses"], 1)
        return [step for step, loss in losses if not math.isfinite(loss)]

    assert steps("loss") == steps("mismatched") == WRONG[:-1]
    assert steps("gradient") == steps("infinite gradient") == []


def test_only_the_row_with_the_wrong_loss_is_named(spoiled_ranks):
    *others, last = [rank["loss"] for rank in spoiled_ranks]
    assert last["refused"] == [[step, last["firsts"][step - 1]] for step in WRONG]
    for rank in others:
        assert [rows for _, rows in rank["refused"]] == [[]] * len(WRONG)


def test_only_the_row_with_the_wrong_mismatched_branch_is_named(spoiled_ranks):
    *others, last = [rank["mismatched"] for rank in spoiled_ranks]
    assert last["refused"] == [[step, last["first_mismatched"][step - 1]] for step in WRONG]
    for rank in others:
        assert [rows for _, rows in rank["refused"]] == [[]] * len(WRONG)


@pytest.mark.parametrize("kind", GRADIENT_KINDS)
def test_of_a_wrong_gradient_all_rows_of_the_step_are_named(spoiled_ranks, kind):
    for number, step in enumerate(WRONG):
        named = [row for rank in spoiled_ranks for row in rank[kind]["refused"][number][1]]
        rows = spoiled_ranks[0][kind]["rows"][step - 1]
        assert len(named) == len(set(named)) == rows
