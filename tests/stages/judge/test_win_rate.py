"""The win rate: ties count half, and whole prompts are drawn for its interval."""

import polars as pl
import pytest

from align.schemas.errors import UsageError
from align.stages.judge.win_rate import win_rate


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


def test_scores_that_are_equal_on_paper_are_a_tie():
    ours, theirs = (
        table(("a", 0, 0.3), ("b", 0, 0.1 + 0.2)),
        table(("a", 0, 0.1 + 0.2), ("b", 0, 0.3)),
    )
    found = win_rate(ours, theirs)
    assert (found.rate, found.ties) == (0.5, 1.0)


def test_an_answer_is_no_better_than_itself_in_another_batch():
    row, again = ("a", 0, 0.25), ("a", 0, 0.25001)
    assert win_rate(table(row), table(again)).rate == 0.0
    found = win_rate(table(row, answer="4"), table(again, answer="4"))
    assert (found.rate, found.ties) == (0.5, 1.0)


def test_a_sample_without_a_score_or_without_its_like_is_counted_and_nothing_else():
    ours = table(("a", 0, 3.0), ("a", 1, None), ("b", 0, 2.0), ("d", 0, 1.0))
    theirs = table(("a", 0, 2.0), ("a", 1, 9.0), ("b", 0, None), ("e", 0, 1.0))
    found = win_rate(ours, theirs)
    assert (found.rate, found.n, found.unjudged) == (1.0, 1, 4)  # a 1, b 0, d 0 and e 0


def test_a_table_judged_pairwise_is_counted_as_it_is():
    ours = table(("a", 0, 1.0), ("a", 1, 0.5), ("b", 0, 0.0), ("c", 0, None))
    counts = {"wins": [1, 0, 0, 0], "ties": [0, 1, 0, 0], "losses": [0, 0, 2, 0]}
    found = win_rate(ours.with_columns(pl.Series(name, value) for name, value in counts.items()))
    assert found.rate == (1 + 0.5) / 4
    assert (found.ties, found.n, found.unjudged) == (1 / 4, 4, 1)


def test_where_every_prompt_is_alike_the_interval_is_the_rate():
    ours = table(*((f"p{index}", number, float(number)) for index in range(9) for number in (0, 1)))
    theirs = table(*((f"p{index}", number, 0.0) for index in range(9) for number in (0, 1)))
    found = win_rate(ours, theirs)  # each prompt: a tie and a win
    assert found.rate == found.low == found.high == 0.75


def test_the_interval_is_that_of_drawn_prompts():
    """Of 100 prompts with 60 wins a drawn share has the deviation sqrt(0.6 * 0.4 / 100) = 0.049."""
    ours = table(*((f"p{index:03}", 0, float(index < 60)) for index in range(100)))
    theirs = table(*((f"p{index:03}", 0, 0.5) for index in range(100)))
    found = win_rate(ours, theirs)
    assert found.rate == 0.6
    assert found.low == pytest.approx(0.6 - 1.96 * 0.049, abs=0.015)
    assert found.high == pytest.approx(0.6 + 1.96 * 0.049, abs=0.015)


def test_many_samples_of_a_prompt_count_as_one_draw():
    """Ten equal samples of each prompt tell no more than one: the interval stays as wide."""
    once = [(f"p{index:03}", 0, float(index < 60)) for index in range(100)]
    tenfold = [(key, number, score) for key, _, score in once for number in range(10)]
    half = [(key, number, 0.5) for key, number, _ in tenfold]
    one = win_rate(table(*once), table(*half))
    ten = win_rate(table(*tenfold), table(*half))
    assert (one.n, one.unjudged, ten.n, ten.unjudged) == (100, 900, 1000, 0)
    assert (ten.rate, ten.low, ten.high) == pytest.approx((one.rate, one.low, one.high))


def test_the_same_seed_gives_the_same_interval_whatever_the_order_of_rows():
    rows = [(f"p{index:03}", 0, float(index % 3)) for index in range(50)]
    theirs = table(*((key, 0, 1.0) for key, _, _ in rows))
    assert win_rate(table(*rows), theirs) == win_rate(table(*reversed(rows)), theirs.reverse())


def test_nothing_to_compare_is_refused():
    with pytest.raises(UsageError, match="no judged comparison"):
        win_rate(table(("a", 0, 1.0)), table(("b", 0, 1.0)))
    with pytest.raises(UsageError, match="not judged pairwise"):
        win_rate(table(("a", 0, 1.0)))
