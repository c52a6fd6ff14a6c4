"""Which branches a method reads, against a reading of one row at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.cache import StoredKind
from align.schemas.errors import CorruptionError
from align.schemas.rows import Role, offsets_of
from align.stages.feed.conversions import Reading, ScoreRules
from align.stages.feed.row_selection import KindCounts, select
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
    """The role and score columns of rows with these own branches, and where each row begins."""
    full = [[*own, *[(M, None)] * (levels * len(own))] for own in rows]
    offsets = offsets_of([len(branches) for branches in full])
    roles = [role for row in full for role, _ in row]
    plain = [np.nan if score is None else score for row in full for _, score in row]
    return np.array(roles, dtype=np.int8), np.array(plain, dtype=np.float32), offsets


def selected(rows, levels, kind, rules=RULES_AS_THEY_ARE, **more):
    """What a method of this kind reads."""
    reading = Reading(kind, mismatched=True, eval_fraction=0.0, rules=rules, **more)
    return select(*stored(rows, levels), reading=reading, source="here")


def unscored(rows):
    """The same rows without scores."""
    return [[(role, None) for role in row] for row in rows]


def rows_of(picked):
    """Each row that is read: the stored row, and of each branch place, role, score, mismatches."""
    scores = [None if np.isnan(score) else score for score in picked.scores.tolist()]
    columns = (picked.own.tolist(), picked.roles.tolist(), scores, picked.mismatched.tolist())
    branches = list(zip(*columns, strict=True))
    bounds = picked.branch_offsets.tolist()
    return [
        (row, branches[start:stop])
        for row, start, stop in zip(picked.rows.tolist(), bounds, bounds[1:], strict=False)
    ]


@settings(max_examples=400)
@given(st.lists(OWN, max_size=8), st.integers(0, 3), st.sampled_from(KINDS), RULES)
def test_branches_are_those_of_a_slow_reading(rows, levels, kind, rules):
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


def test_a_rejected_branch_stored_first_is_read_second():
    picked = selected(unscored([[R, C]]), 2, "paired")
    # stored: R C | R1 C1 | R2 C2
    assert picked.own.tolist() == [1, 0]
    assert picked.roles.tolist() == [C, R]
    assert picked.mismatched.tolist() == [[3, 5], [2, 4]]


def test_a_scored_branch_keeps_its_own_mismatches_whatever_becomes_of_it():
    row = [(X, 1.0), (X, 3.0), (X, 2.0)]
    # stored: 0 1 2 | 3 4 5 | 6 7 8
    pair = selected([row], 2, "paired")
    assert (pair.own.tolist(), pair.mismatched.tolist()) == ([1, 0], [[4, 7], [3, 6]])
    labels = selected([row], 2, "labelled", ScoreRules(threshold="median"))
    assert (labels.own.tolist(), labels.mismatched.tolist()) == ([0, 1], [[3, 6], [4, 7]])


def test_pairs_are_labels_to_a_method_that_reads_labels():
    picked = selected(unscored([[C, R], [U]]), 0, "labelled")
    assert picked.roles.tolist() == [D, U, U]


def test_every_stored_row_is_counted_by_its_kind():
    picked = selected(unscored([[C, R], [U, D, D], [X, X]]), 1, "paired")
    assert picked.kinds == {
        StoredKind.PAIRED: KindCounts(stored=1, read=1, made=1, unscored=1),
        StoredKind.UNPAIRED: KindCounts(stored=1, unscored=1),
        StoredKind.SCORED: KindCounts(stored=1, unscored=1),
    }
    assert picked.rows.tolist() == [0]


def test_rows_that_become_several_or_none_are_counted():
    rows = [[(X, 1.0), (X, 2.0), (X, 4.0)], [(X, 1.0), (X, 1.0)], [(X, None)]]
    every = selected(rows, 0, "paired", ScoreRules(pairs="all"))
    assert every.kinds[StoredKind.SCORED] == KindCounts(stored=3, read=1, made=3, unscored=1)
    # Of 1, 2 and 4 the median is 2; of two equal scores each is the median.
    labels = selected(rows, 0, "labelled", ScoreRules(threshold="median"))
    assert labels.kinds[StoredKind.SCORED] == KindCounts(3, read=1, made=1, unscored=1, left_out=1)


def test_with_a_context_every_branch_is_a_row():
    picked = selected(unscored([[U, D], [R, C]]), 1, "labelled", context={D: (7,), U: (8,)})
    assert picked.rows.tolist() == [0, 0, 1, 1]
    assert picked.branch_offsets.tolist() == [0, 1, 2, 3, 4]
    assert picked.roles.tolist() == [U, D, D, U]
    # stored: U D | U1 D1 | R C | R1 C1
    assert (picked.own.tolist(), picked.mismatched.ravel().tolist()) == ([0, 1, 5, 4], [2, 3, 7, 6])


@pytest.mark.parametrize(
    "roles",
    [[C], [C, C], [C, R, R], [C, D], [D, X], [M], [M, C, R, M], [C, R, M], [C, M, R, M]],
    ids=str,
)
def test_branches_that_fit_no_kind_of_data_are_damage(roles):
    with pytest.raises(CorruptionError, match="here holds rows"):
        selected_raw(roles, [0, len(roles)])


def test_rows_with_other_numbers_of_mismatches_are_damage():
    with pytest.raises(CorruptionError):
        selected_raw([C, R, M, M, C, R], [0, 4, 6])


def selected_raw(roles, offsets):
    reading = Reading("paired", mismatched=False, eval_fraction=0.0)
    scores = np.full(len(roles), np.nan)
    select(np.array(roles, np.int8), scores, np.array(offsets), reading=reading, source="here")
