"""Which completions a method reads, against a reading of one row at a time."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.columns import offsets_of
from align.schemas.rows import Role
from align.stages.feed.select import ReadSpec, ScoreRules, select
from support.slow_reading import read_slowly

C, R, D, U, X, M = Role
SCORE = st.sampled_from([None, 0.0, 1.0, 2.0, 3.0, 5.0])
SCORED = st.lists(st.tuples(st.just(X), SCORE.filter(lambda score: score is not None)), min_size=1)
OWN = st.one_of(
    st.tuples(st.permutations([C, R]), SCORE, SCORE).map(
        lambda drawn: [(drawn[0][0], drawn[1]), (drawn[0][1], drawn[2])]
    ),
    st.lists(st.tuples(st.sampled_from([D, U]), SCORE), min_size=1, max_size=4),
    st.lists(st.tuples(st.just(X), SCORE), min_size=1, max_size=5),
    SCORED,
)
RULES = st.builds(
    ScoreRules,
    pairs=st.sampled_from(["best_worst", "all"]),
    min_gap=st.sampled_from([0.0, 1.0, 2.5]),
    threshold=st.sampled_from(["mean", "median", 1.0, 2.5]),
)
RULES_AS_THEY_ARE = ScoreRules()
KINDS = ("paired", "labelled", "grouped", "imitated")


def stored(rows, levels):
    """The role and score columns of rows with these own completions, and where each row begins."""
    full = [[*own, *[(M, None)] * (levels * len(own))] for own in rows]
    offsets = offsets_of([len(completions) for completions in full])
    roles = [role for row in full for role, _ in row]
    plain = [np.nan if score is None else score for row in full for _, score in row]
    return np.array(roles, dtype=np.int8), np.array(plain, dtype=np.float64), offsets


def selected(rows, levels, kind, rules=RULES_AS_THEY_ARE, **more):
    """What a method of this kind reads."""
    spec = ReadSpec(kind, mismatched=True, eval_fraction=0.0, rules=rules, **more)
    keys = np.arange(len(rows), dtype=np.uint64)
    return select(*stored(rows, levels), spec=spec, source="here", split_keys=keys)


def unscored(rows):
    """The same rows without scores."""
    return [[(role, None) for role in row] for row in rows]


def rows_of(found):
    """Each row that is read: the stored row, and each completion's place, role, score, partners."""
    picked, mismatched, _ = found
    scores = [None if np.isnan(score) else score for score in picked.scores.tolist()]
    columns = (picked.indices.tolist(), picked.roles.tolist(), scores, mismatched.tolist())
    completions = list(zip(*columns, strict=True))
    bounds = picked.offsets.tolist()
    return [
        (row, completions[start:stop])
        for row, start, stop in zip(picked.rows.tolist(), bounds, bounds[1:], strict=False)
    ]


@settings(max_examples=200)
@given(st.lists(OWN, max_size=8), st.integers(0, 3), st.sampled_from(KINDS), RULES)
def test_completions_are_those_of_a_slow_reading(rows, levels, kind, rules):
    expected, start = [], 0
    for number, own in enumerate(rows):
        expected += [
            (
                number,
                [
                    (
                        start + place,
                        role,
                        score,
                        [start + place + len(own) * level for level in range(1, levels + 1)],
                    )
                    for place, role, score in made
                ],
            )
            for made in read_slowly(own, kind, rules)
        ]
        start += len(own) * (1 + levels)
    assert rows_of(selected(rows, levels, kind, rules)) == expected


def test_with_a_context_every_completion_is_a_row():
    picked = selected(unscored([[U, D], [R, C]]), 1, "labelled", context={D: (7,), U: (8,)})
    # stored: U D | U1 D1 | R C | R1 C1
    assert rows_of(picked) == [
        (0, [(0, U, None, [2])]),
        (0, [(1, D, None, [3])]),
        (1, [(5, D, None, [7])]),
        (1, [(4, U, None, [6])]),
    ]


def read_of(scores, kind, **rules):
    """Each scored row that is read: the stored row, and the place and role of its completions."""
    rows = [[(X, score) for score in row] for row in scores]
    return [
        (row, [(place, role) for place, role, *_ in completions])
        for row, completions in rows_of(selected(rows, 0, kind, ScoreRules(**rules)))
    ]


def test_scores_that_are_equal_on_paper_keep_their_order():
    assert 0.1 + 0.2 > 0.3  # as binary numbers
    rows = [[0.3, 0.1 + 0.2, 0], [1, 0.3, 0.1 + 0.2]]
    assert read_of(rows, "paired") == [(0, [(0, C), (2, R)]), (1, [(3, C), (5, R)])]
    assert read_of(rows, "imitated") == [(0, [(0, D)]), (1, [(3, D)])]


def test_a_gap_in_decimals_is_that_of_scores_in_decimals():
    # As binary numbers 0.3 - 0.2 is less than 0.1, 0.4 - 0.3 and 8.3 - 8.2 are more.
    rows = [[0.3, 0.2], [0.4, 0.3], [8.3, 8.2], [-0.2, -0.3], [100.1, 100.0], [0.1, 0.0]]
    rows += [[0.31, 0.2], [8.31, 8.2], [100.11, 100.0]]
    for precision, pairs in itertools.product((np.float64, np.float32), ("best_worst", "all")):
        written = np.array(rows, dtype=precision).tolist()
        read = read_of(written, "paired", pairs=pairs, min_gap=0.1)
        assert [row for row, _ in read] == [6, 7, 8], (precision, pairs)


def test_a_difference_of_more_than_a_millionth_makes_a_pair():
    big = 2.0**40
    rows = [[big + 2**22, big], [0.1 + 0.2, 0.3], [1e-9, 0.0], [0.123457, 0.123456], [big + 1, big]]
    for kind in ("paired", "labelled"):
        assert [row for row, _ in read_of(rows, kind)] == [0, 2, 3]


def test_a_score_that_is_its_threshold_but_for_rounding_gets_no_label():
    decimals = [0.1, 0.2, 0.3]  # their sum is 0.6000000000000001
    singles = np.float32([0.6, 0.7, 0.8]).tolist()
    for scores, limit in ((decimals, "mean"), *((singles, one) for one in (0.7, "mean", "median"))):
        assert read_of([scores], "labelled", threshold=limit) == [(0, [(0, U), (2, D)])], limit
    equal = [[0.1] * 3, [0.7] * 7, [1 / 3] * 11, [5]]
    for limit in ("mean", "median"):
        assert read_of(equal, "labelled", threshold=limit) == []


def test_an_unscored_bad_completion_gets_the_bad_score():
    """Also where a single one is missing: a score and a 1 cannot be compared."""
    rows = [[(C, None), (R, None)], [(C, 8), (R, None)], [(U, None)], [(D, 5), (U, 4)]]
    for bad in (0.0, -1.0):
        picked, *_ = selected(rows, 0, "grouped", ScoreRules(bad_score=bad))
        assert picked.scores.tolist() == [1, bad, 1, bad, bad, 5, 4]
