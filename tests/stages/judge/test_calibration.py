"""The figures of a judge on gold pairs, worked by hand."""

import pytest

from align.stages.judge.calibration import Calibration, Proportion, of_comparisons, of_scores
from align.stages.judge.verdicts import SAME, Compared


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    [
        (5, 10, 0.2366, 0.7634),  # (0.5 + 0.1921) / 1.3841 -+ 1.96 * sqrt(0.025 + 0.0096) / 1.3841
        (0, 10, 0.0, 0.2775),  # 0.3841 / 1.3841
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I
    ],
)
def test_the_interval_is_wilsons(count, of, low, high):
    assert Proportion(count, of).interval() == pytest.approx((low, high), abs=1e-4)


def test_comparisons_are_counted_by_hand():
    pairs = [
        Compared("A", "B"),  # right in both orders
        Compared("A", "B"),
        Compared("B", "A"),  # wrong in both
        Compared("A", "A"),  # prefers the first
        Compared("B", "B"),  # prefers the second
        Compared("tie", "B"),
        Compared(None, "B"),
        SAME,
    ]
    cells = {name: (share.count, share.of) for name, share in of_comparisons(pairs).items()}
    assert cells == {
        "agrees with gold, where it decides": (2, 3),
        "ties": (4, 7),
        "not judged": (1, 8),
        "gold one shown first: preferred": (3, 5),  # A A B A B tie
        "gold one shown second: preferred": (4, 6),  # B B A A B B
        "first answer preferred": (5, 11),  # A's of A B A B B A A A B B B
        "verdict flips with the order": (2, 6),
    }


def test_scores_are_counted_by_hand():
    scores = [(2.0, 1.0), (1.0, 2.0), (0.1 + 0.2, 0.3), (None, 1.0), (3.0, 1.0)]
    cells = {name: (share.count, share.of) for name, share in of_scores(scores).items()}
    assert cells == {
        "agrees with gold, where it decides": (2, 3),
        "ties": (1, 4),
        "not judged": (1, 5),
    }


def test_a_table_without_a_decision_has_no_share():
    text = Calibration("rubric", 1, 2, of_scores([(1.0, 1.0)])).text()
    assert "2 rows left out" in text
    (line,) = (line for line in text.splitlines() if "agrees with gold" in line)
    assert line.split()[-2:] == ["0", "0"]
