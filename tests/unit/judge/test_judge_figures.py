"""The figures of judged samples and of a judge itself, worked by hand."""

import polars as pl
import pytest

from align.schemas.errors import UsageError
from align.stages.judge.calibration import Calibration, Proportion, comparison_shares, score_shares
from align.stages.judge.verdicts import EQUAL_TEXTS, Comparison
from align.stages.judge.win_rate import win_rate
from support.refusals import refuses


def table(*rows, answer=None):
    """Judged samples; without `answer` each says what it is worth."""
    names = ("prompt_key", "number", "score")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    return pl.DataFrame([{**row, "completion": answer or f"worth {row['score']}"} for row in found])


def test_scores_of_the_same_prompt_and_number_are_compared():
    ours = table(("a", 0, 3.0), ("a", 1, 1.0), ("b", 0, 2.0), ("c", 0, 5.0))
    theirs = table(("b", 0, 2.0), ("a", 1, 4.0), ("a", 0, 2.0), ("c", 0, 1.0))
    found = win_rate(ours, theirs)
    assert found.rate == (1 + 0 + 0.5 + 1) / 4  # a 0 is won, a 1 lost, b 0 a tie, c 0 won
    assert (found.ties, found.n, found.unjudged) == (1 / 4, 4, 0)
    # Without a score or without its like a sample is counted, and nothing else.
    ours = table(("a", 0, 3.0), ("a", 1, None), ("b", 0, 2.0), ("d", 0, 1.0))
    theirs = table(("a", 0, 2.0), ("a", 1, 9.0), ("b", 0, None), ("e", 0, 1.0))
    found = win_rate(ours, theirs)
    assert (found.rate, found.n, found.unjudged) == (1.0, 1, 4)  # a 1, b 0, d 0 and e 0


def test_equal_answers_and_scores_that_are_equal_on_paper_are_a_tie():
    on_paper = table(("a", 0, 0.3)), table(("a", 0, 0.1 + 0.2))
    row, in_another_batch = ("a", 0, 0.25), ("a", 0, 0.25001)
    of_one_answer = table(row, answer="4"), table(in_another_batch, answer="4")
    for ours, theirs in (on_paper, on_paper[::-1], of_one_answer):
        found = win_rate(ours, theirs)
        assert (found.rate, found.ties) == (0.5, 1.0)
    assert win_rate(table(row), table(in_another_batch)).rate == 0.0


def test_a_table_judged_pairwise_is_counted_as_it_is():
    ours = table(("a", 0, 1.0), ("a", 1, 0.5), ("b", 0, 0.0), ("c", 0, None))
    counts = {"wins": [1, 0, 0, 0], "ties": [0, 1, 0, 0], "losses": [0, 0, 2, 0]}
    found = win_rate(ours.with_columns(pl.Series(name, value) for name, value in counts.items()))
    assert found.rate == (1 + 0.5) / 4
    assert (found.ties, found.n, found.unjudged) == (1 / 4, 4, 1)


def test_the_interval_is_that_of_drawn_prompts_however_many_samples_they_have():
    """Of 100 prompts with 60 wins a drawn share has the deviation sqrt(0.6 * 0.4 / 100) = 0.049.

    Ten equal samples of each prompt tell no more than one.
    """
    once = [(f"p{index:03}", 0, float(index < 60)) for index in range(100)]
    tenfold = [(key, number, score) for key, _, score in once for number in range(10)]
    half = table(*((key, number, 0.5) for key, number, _ in tenfold))
    one, ten = win_rate(table(*once), half), win_rate(table(*tenfold), half)
    assert one.low == pytest.approx(0.6 - 1.96 * 0.049, abs=0.015)
    assert one.high == pytest.approx(0.6 + 1.96 * 0.049, abs=0.015)
    assert (one.n, one.unjudged, ten.n, ten.unjudged) == (100, 900, 1000, 0)
    assert (ten.rate, ten.low, ten.high) == pytest.approx((0.6, one.low, one.high))
    assert win_rate(table(*reversed(once)), half.reverse()) == one


def test_the_interval_of_prompts_with_more_comparisons_is_around_the_rate():
    """Of nine prompts that lost their one comparison and one that won all of 91, 0.91 are won."""
    lost = [(f"p{index}", 0, 0.0) for index in range(9)]
    rows = [*lost, *(("q", number, 1.0) for number in range(91))]
    found = win_rate(table(*rows), table(*((key, number, 0.5) for key, number, _ in rows)))
    assert found.rate == 0.91
    assert found.high > 0.91  # the mean of the ten prompts' own rates is 0.1


def test_nothing_to_compare_is_refused():
    with refuses(UsageError, "judge.against"):
        win_rate(table(("a", 0, 1.0)), table(("b", 0, 1.0)))
    with refuses(UsageError, "pairwise", "column"):
        win_rate(table(("a", 0, 1.0)))


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    [
        (5, 10, 0.2366, 0.7634),  # (0.5 + 0.1921) / 1.3841 -+ 1.96 * sqrt(0.025 + 0.0096) / 1.3841
        (0, 10, 0.0, 0.2775),  # 0.3841 / 1.3841
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I
    ],
)
def test_the_interval_of_a_share_is_wilsons(count, of, low, high):
    assert Proportion(count, of).interval() == pytest.approx((low, high), abs=1e-4)


def cells(shares):
    return {name: (share.count, share.total) for name, share in shares.items()}


def test_comparisons_and_scores_of_gold_pairs_are_counted_by_hand():
    pairs = [
        Comparison("A", "B"),  # right in both orders
        Comparison("A", "B"),
        Comparison("B", "A"),  # wrong in both
        Comparison("A", "A"),  # prefers the first
        Comparison("B", "B"),  # prefers the second
        Comparison("tie", "B"),
        Comparison(None, "B"),
        EQUAL_TEXTS,
    ]
    assert cells(comparison_shares(pairs)) == {
        "agrees with gold, where it decides": (2, 3),
        "ties": (4, 7),
        "not judged": (1, 8),
        "gold one shown first: preferred": (3, 5),  # A A B A B tie
        "gold one shown second: preferred": (4, 6),  # B B A A B B
        "first answer preferred": (5, 11),  # A's of A B A B B A A A B B B
        "verdict flips with the order": (2, 6),
    }
    scores = [(2.0, 1.0), (1.0, 2.0), (0.1 + 0.2, 0.3), (None, 1.0), (3.0, 1.0)]
    assert cells(score_shares(scores)) == {
        "agrees with gold, where it decides": (2, 3),
        "ties": (1, 4),
        "not judged": (1, 5),
    }
    undecided = Calibration("rubric", 1, 2, score_shares([(1.0, 1.0)])).text()
    (line,) = (line for line in undecided.splitlines() if "agrees with gold" in line)
    assert line.split()[-2:] == ["0", "0"]
