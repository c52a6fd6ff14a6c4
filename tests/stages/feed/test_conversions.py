"""Each conversion on rows small enough to be worked out by hand."""

import numpy as np
import pytest

from align.schemas.rows import Role, offsets_of
from align.stages.feed import conversions
from align.stages.feed.conversions import Own, ScoreRules

C, R, D, U, X, M = Role
RULES = ScoreRules()


def own(*rows):
    """Rows of (role, score) branches, all of them stored side by side."""
    branches = [branch for row in rows for branch in row]
    return Own(
        rows=np.arange(len(rows)),
        offsets=offsets_of([len(row) for row in rows]),
        places=np.arange(len(branches)),
        roles=np.array([role for role, _ in branches], dtype=np.int8),
        scores=np.array([score for _, score in branches], dtype=np.float64),
    )


def scored(*rows):
    return own(*([(X, score) for score in row] for row in rows))


def shown(made):
    """Each row as its (place, role) branches."""
    branches = list(zip(made.places.tolist(), made.roles.tolist(), strict=True))
    return [branches[a:b] for a, b in zip(made.offsets, made.offsets[1:], strict=False)]


def test_the_best_stands_against_the_worst():
    made = conversions.pairs(scored([0.2, 0.9, 0.5], [3, 1]), RULES)
    assert shown(made) == [[(1, C), (0, R)], [(3, C), (4, R)]]
    assert made.scores.tolist() == pytest.approx([0.9, 0.2, 3, 1])
    assert made.rows.tolist() == [0, 1]


def test_of_equal_scores_the_first_is_best_and_the_last_is_worst():
    assert shown(conversions.pairs(scored([1, 2, 2, 1]), RULES)) == [[(1, C), (3, R)]]


def test_scores_that_are_equal_on_paper_keep_their_order():
    assert 0.1 + 0.2 > 0.3  # as binary numbers
    rows = scored([0.3, 0.1 + 0.2, 0], [1, 0.3, 0.1 + 0.2])
    assert shown(conversions.pairs(rows, RULES)) == [[(0, C), (2, R)], [(3, C), (5, R)]]
    assert shown(conversions.best_ones(rows, RULES)) == [[(0, D)], [(3, D)]]


def test_a_pair_is_further_apart_than_the_least_gap():
    rows = scored([3, 1], [3, 2], [5], [4, 4])
    assert conversions.pairs(rows, RULES).rows.tolist() == [0, 1]
    assert conversions.pairs(rows, ScoreRules(min_gap=1)).rows.tolist() == [0]


def test_every_better_completion_stands_against_every_worse_one():
    made = conversions.pairs(scored([3, 1, 2], [7, 7, 8]), ScoreRules(pairs="all"))
    assert shown(made) == [
        [(0, C), (2, R)],  # 3 over 2
        [(0, C), (1, R)],  # 3 over 1
        [(2, C), (1, R)],  # 2 over 1
        [(5, C), (3, R)],  # 8 over either 7, and no 7 over the other
        [(5, C), (4, R)],
    ]
    assert made.rows.tolist() == [0, 0, 0, 1, 1]
    wide = conversions.pairs(scored([3, 1, 2], [7, 7, 8]), ScoreRules(pairs="all", min_gap=1))
    assert shown(wide) == [[(0, C), (1, R)]]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        ("mean", [[(0, U), (1, U), (2, D)]]),  # of 1, 2 and 6: 3
        ("median", [[(0, U), (2, D)]]),  # 2, and what is 2 itself gets no label
        (1.5, [[(0, U), (1, D), (2, D)]]),
        (9.0, [[(0, U), (1, U), (2, U)]]),
    ],
)
def test_a_threshold_makes_labels(threshold, expected):
    made = conversions.labels_of_scores(scored([1, 2, 6]), ScoreRules(threshold=threshold))
    assert shown(made) == expected


def test_the_median_of_an_even_number_lies_between_two():
    made = conversions.labels_of_scores(scored([1, 4, 2, 9]), ScoreRules(threshold="median"))
    assert shown(made) == [[(0, U), (1, D), (2, U), (3, D)]]  # 3


@pytest.mark.parametrize("threshold", ["mean", "median"])
def test_equal_scores_say_nothing(threshold):
    rows = scored([0.1] * 3, [0.7] * 7, [1 / 3] * 11, [5])
    assert shown(conversions.labels_of_scores(rows, ScoreRules(threshold=threshold))) == []


def test_a_score_that_is_its_mean_but_for_rounding_gets_no_label():
    # 0.1 + 0.2 + 0.3 is 0.6000000000000001.
    made = conversions.labels_of_scores(scored([0.1, 0.2, 0.3]), RULES)
    assert shown(made) == [[(0, U), (2, D)]]


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize("pairs", ["best_worst", "all"])
def test_a_gap_in_decimals_is_that_of_scores_in_decimals(kind, pairs):
    # As binary numbers 0.3 - 0.2 is less than 0.1, 0.4 - 0.3 and 8.3 - 8.2 are more.
    rows = [[0.3, 0.2], [0.4, 0.3], [8.3, 8.2], [-0.2, -0.3], [100.1, 100.0], [0.1, 0.0]]
    rows += [[0.31, 0.2], [8.31, 8.2], [100.11, 100.0]]
    written = scored(*np.array(rows, dtype=kind).astype(np.float64).tolist())
    made = conversions.pairs(written, ScoreRules(pairs=pairs, min_gap=0.1))
    assert made.rows.tolist() == [6, 7, 8]


def test_the_smallest_difference_that_was_written_down_makes_a_pair():
    big = 2.0**40
    rows = scored([big + 1, big], [0.1 + 0.2, 0.3], [1e-9, 0.0], [0.123456789012, 0.123456789011])
    assert conversions.pairs(rows, RULES).rows.tolist() == [0, 2, 3]
    assert conversions.labels_of_scores(rows, RULES).rows.tolist() == [0, 2, 3]


@pytest.mark.parametrize("threshold", [0.7, "mean", "median"])
def test_scores_of_single_precision_meet_their_threshold_in_decimals(threshold):
    rows = np.array([[0.6, 0.7, 0.8]], dtype=np.float32).astype(np.float64).tolist()
    made = conversions.labels_of_scores(scored(*rows), ScoreRules(threshold=threshold))
    assert shown(made) == [[(0, U), (2, D)]]


def test_a_number_is_as_exact_as_the_scores():
    made = conversions.labels_of_scores(scored([0.1, 0.3]), ScoreRules(threshold=0.1))
    assert shown(made) == [[(1, D)]]


def test_the_best_one_is_imitated():
    made = conversions.best_ones(scored([1, 3, 2], [4, 4], [0]), RULES)
    assert shown(made) == [[(1, D)], [(3, D)], [(5, D)]]


@pytest.mark.parametrize(
    "convert", [conversions.pairs, conversions.labels_of_scores, conversions.best_ones]
)
def test_a_row_that_lacks_a_score_is_not_judged(convert):
    made = convert(scored([1, np.nan, 3], [np.nan], [1, 2]), RULES)
    assert made.rows.tolist() == [2]
    assert convert(scored([np.nan]), RULES).rows.tolist() == []


def test_chosen_and_desirable_ones_are_imitated():
    rows = own([(C, 1), (R, 2)], [(U, 0)], [(D, 1), (U, 1), (D, 1)])
    made = conversions.good_ones(rows, RULES)
    assert shown(made) == [[(0, D)], [(3, D), (5, D)]]
    assert made.rows.tolist() == [0, 2]


def test_pairs_are_labels():
    made = conversions.labels_of_pairs(own([(C, 1), (R, 2)]), RULES)
    assert shown(made) == [[(0, D), (1, U)]]


def test_groups_take_the_scores_of_the_data():
    made = conversions.candidates(own([(C, 0.5), (R, 4)], [(D, -3)]), RULES)
    assert shown(made) == [[(0, X), (1, X)], [(2, X)]]
    assert made.scores.tolist() == [0.5, 4, -3]


def test_groups_without_scores_get_one_and_nought():
    """Also where a single one is missing: a score and a 1 cannot be compared."""
    nan = np.nan
    rows = own([(C, nan), (R, nan)], [(C, 8), (R, nan)], [(U, nan)], [(D, nan), (U, nan)])
    assert conversions.candidates(rows, RULES).scores.tolist() == [1, 0, 1, 0, 0, 1, 0]
    rules = ScoreRules(bad_score=-1)
    assert conversions.candidates(rows, rules).scores.tolist() == [1, -1, 1, -1, -1, 1, -1]


def test_a_group_that_was_stored_as_one_gets_no_score_it_has_not():
    made = conversions.scored_candidates(scored([1, np.nan]), RULES)
    assert np.isnan(made.scores).tolist() == [False, True]
