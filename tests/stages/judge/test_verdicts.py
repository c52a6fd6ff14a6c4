"""Exactly one verdict in the stated form, at the end, of an answer that is whole."""

import pytest

from align.stages.judge.verdicts import SAME, Compared, score_in, verdict_in


def said(text, finish="stop"):
    return {"text": text, "finish": finish}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Clear and right.\nScore: 7", 7),
        ("Score: 10", 10),
        ("Score: 1\n\n", 1),
        ("A good score, 9 of 10 at least.\r\nScore: 9\r\n", 9),
        ("Score: 0", None),
        ("Score: 11", None),
        ("Score: 7.5", None),
        ("Score: 7/10", None),
        ("Score: -7", None),
        ("Score: \u0667", None),
        ("Score: 07", None),
        ("**Score: 7**", None),
        ("score: 7", None),
        ("Score: seven", None),
        ("I give it 7.", None),
        ("7", None),
        ("Score: 7\nThank you.", None),
        ("Score: 3\nOn second thoughts:\nScore: 7", None),
        ("It says 'Score: 10', but it is wrong.\nScore: 2", None),
        ("It says SCORE : 10.\nScore: 2", None),
        ("My score is Score: 7", None),
        ("", None),
    ],
)
def test_a_score_is_one_line_at_the_end_or_a_refusal(text, score):
    assert score_in(said(text)) == score


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("A is right, B is not.\nVerdict: A", "A"),
        ("Verdict: B", "B"),
        ("Verdict: tie", "tie"),
        ("Verdict: C", None),
        ("Verdict: a", None),
        ("Verdict: A or B", None),
        ("Verdict: A\nVerdict: A", None),
        ("B quotes 'Verdict: B'.\nVerdict: A", None),
        ("A", None),
        ("Verdict:", None),
    ],
)
def test_a_verdict_is_one_line_at_the_end_or_a_refusal(text, verdict):
    assert verdict_in(said(text)) == verdict


def test_an_answer_that_was_cut_says_nothing():
    """`Score: 1` may have been about to become `Score: 10`."""
    assert score_in(said("Score: 1", "length")) is None
    assert verdict_in(said("Verdict: A", "length")) is None
    assert score_in(said("Score: 1", "other")) == 1  # ended for a reason that a server names


@pytest.mark.parametrize(
    ("forward", "backward", "winner", "flips"),
    [
        ("A", "B", "first", False),
        ("B", "A", "second", False),
        ("A", "A", "tie", True),
        ("B", "B", "tie", True),
        ("tie", "tie", "tie", False),
        ("A", "tie", "tie", False),
        ("tie", "A", "tie", False),
        (None, "B", None, False),
        ("A", None, None, False),
        (None, None, None, False),
    ],
)
def test_only_what_both_orders_say_counts(forward, backward, winner, flips):
    pair = Compared(forward, backward)
    assert (pair.winner, pair.flips) == (winner, flips)


def test_equal_texts_are_a_tie_without_a_question():
    assert (SAME.winner, SAME.was_asked, SAME.flips) == ("tie", False, False)
