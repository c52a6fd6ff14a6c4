"""Which branches a method reads, against a reading of one row at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.errors import CorruptionError
from align.schemas.ragged import offsets_of
from align.schemas.rows import Role
from align.stages.feed.selection import StoredKind, select

C, R, D, U, X, M = Role
OWN = st.one_of(
    st.permutations([C, R]),
    st.lists(st.sampled_from([D, U]), min_size=1, max_size=4),
    st.lists(st.just(X), min_size=1, max_size=4),
)


def stored(rows, levels):
    """The role column of rows with these own branches."""
    full = [[*own, *[M] * (levels * len(own))] for own in rows]
    offsets = offsets_of([len(roles) for roles in full])
    return np.array([role for roles in full for role in roles], dtype=np.int8), offsets


def read_slowly(rows, levels, kind):
    """Each row that is read: its number, and of each branch place, role and mismatches."""
    result, start = [], 0
    for number, own in enumerate(rows):
        branches = [
            (start + i, role, [start + i + k * len(own) for k in range(1, levels + 1)])
            for i, role in enumerate(own)
        ]
        if sorted(own) == [C, R]:
            branches.sort(key=lambda branch: branch[1])
            if kind == "labelled":
                branches = [(place, role + 2, more) for place, role, more in branches]
            result.append((number, branches))
        elif kind == "labelled" and X not in own:
            result.append((number, branches))
        start += len(own) * (1 + levels)
    return result


@settings(max_examples=200, deadline=None)
@given(st.lists(OWN, max_size=8), st.integers(0, 3), st.sampled_from(["paired", "labelled"]))
def test_branches_are_those_of_a_slow_reading(rows, levels, kind):
    picked = select(*stored(rows, levels), kind=kind, source="here")
    expected = read_slowly(rows, levels if rows else 0, kind)
    assert picked.rows.tolist() == [number for number, _ in expected]
    assert np.diff(picked.branch_offsets).tolist() == [len(own) for _, own in expected]
    flat = [branch for _, own in expected for branch in own]
    assert picked.own.tolist() == [place for place, _, _ in flat]
    assert picked.roles.tolist() == [role for _, role, _ in flat]
    assert picked.mismatched.tolist() == [more for _, _, more in flat]


def test_a_rejected_branch_stored_first_is_read_second():
    picked = select(*stored([[R, C]], 2), kind="paired", source="here")
    # stored: R C | R1 C1 | R2 C2
    assert picked.own.tolist() == [1, 0]
    assert picked.roles.tolist() == [C, R]
    assert picked.mismatched.tolist() == [[3, 5], [2, 4]]


def test_pairs_are_labels_to_a_method_that_reads_labels():
    picked = select(*stored([[C, R], [U]], 0), kind="labelled", source="here")
    assert picked.roles.tolist() == [D, U, U]


def test_every_stored_row_is_told_by_its_kind():
    picked = select(*stored([[C, R], [U, D, D], [X, X]], 1), kind="paired", source="here")
    assert picked.kinds.tolist() == [StoredKind.PAIRED, StoredKind.UNPAIRED, StoredKind.SCORED]
    assert picked.rows.tolist() == [0]


@pytest.mark.parametrize(
    "roles",
    [[C], [C, C], [C, R, R], [C, D], [D, X], [M], [M, C, R, M], [C, R, M], [C, M, R, M]],
    ids=str,
)
def test_branches_that_fit_no_kind_of_data_are_damage(roles):
    with pytest.raises(CorruptionError, match="here holds rows"):
        select(np.array(roles, np.int8), np.array([0, len(roles)]), kind="paired", source="here")


def test_rows_with_other_numbers_of_mismatches_are_damage():
    roles = np.array([C, R, M, M, C, R], np.int8)
    with pytest.raises(CorruptionError):
        select(roles, np.array([0, 4, 6]), kind="paired", source="here")
