"""Arcs of the ring and the mismatched branches in them, against one row at a time."""

import pytest
from encoded_rows import all_rows, encoded, make_ring, plain
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from align.schemas.errors import BadDataError
from align.schemas.rows import Role
from align.stages.prepare.keyed import KeyedRows
from align.stages.prepare.units import CutRule, build_unit, unit_offsets

EOS = 9

relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def folder(tmp_path_factory):
    """A new one for every example."""
    return lambda: tmp_path_factory.mktemp("units")


@st.composite
def fitted_records(draw, *, max_length):
    """Records as the encoder leaves them: fitted to max_length, EOS last unless cut."""
    body = st.lists(st.sampled_from([1, 2, EOS]), max_size=6)
    records = []
    for row in range(draw(st.integers(4, 20))):
        prompt = draw(st.lists(st.integers(1, 3), min_size=1, max_size=max_length - 1))
        completions, cut = [], []
        for tail in draw(st.lists(body, min_size=2, max_size=2)):
            whole = [*tail, EOS]
            kept = whole[: max_length - len(prompt)]
            while len(kept) < len(whole) and kept and kept[-1] == EOS:
                kept = kept[:-1]
            completions.append(kept)
            cut.append(len(whole) - len(kept))
        if all(completions):
            records.append(encoded(prompt, *completions, cut=cut, row=row))
    return records


def fit(completion, room):
    """What a completion becomes behind another prompt; nothing when nothing is left."""
    if len(completion) <= room:
        return completion
    kept = completion[:room]
    while kept and kept[-1] == EOS:
        kept = kept[:-1]
    return kept


def by_hand(ring, rows, start, stop, max_length):
    """Each row of an arc with its mismatched branches, or None where one cannot be had."""
    every = [(branch[0], branch[3]) for row in rows for branch in row.branches]
    first = sum(len(row.branches) for row in rows[:start])
    result = []
    for row in rows[start:stop]:
        branches = list(row.branches)
        possible = True
        for k in range(ring.num_pairs):
            for place, (own, *_) in enumerate(row.branches):
                number = first + place
                partner, lost = every[int(ring.partners(number, number + 1)[k, 0])]
                fitted = fit(partner, max_length - len(row.prompt))
                lost += len(partner) - len(fitted)
                branches.append((fitted, int(Role.MISMATCHED), None, lost))
                possible &= bool(fitted) and fitted != own
        result.append(row._replace(branches=tuple(branches)) if possible else None)
        first += len(row.branches)
    return result


def read(unit):
    keys = [0] * len(unit.rows)
    keyed = KeyedRows(unit.rows, keys, [0] * len(unit.rows.completions))
    return [row._replace(prompt_key=None, completion_keys=None) for row in plain(keyed)]


@relaxed
@given(st.data(), st.integers(2, 9), st.integers(0, 3))
def test_a_unit_holds_each_rows_own_branches_then_its_partners_k_by_k(
    folder, data, max_length, num_pairs
):
    records = data.draw(fitted_records(max_length=max_length))
    assume(len(records) > 1)
    try:
        ring, _ = make_ring(folder(), records, num_pairs=num_pairs)
    except BadDataError:
        assume(False)
    rows = all_rows(ring)
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    unit = build_unit(ring, start, stop, CutRule(max_length, EOS))
    expected = by_hand(ring, rows, start, stop, max_length)
    good = [row for row in expected if row]
    assert read(unit) == [row._replace(prompt_key=None, completion_keys=None) for row in good]
    lost = len(expected) - len(good)
    assert unit.quarantined == ({"too_long": lost} if lost else {})
    assert unit.first_key == f"{rows[start].prompt_key:016x}"
    assert unit.last_key == f"{rows[stop - 1].prompt_key:016x}"


def ring_of_two(folder, one, other):
    """Two prompts with one completion each: they can only be each other's partners."""
    return make_ring(folder, [one, other], num_pairs=1)[0]


def test_a_partner_that_becomes_the_completion_when_cut_quarantines_its_row_only(tmp_path):
    # Behind three tokens of prompt one token fits: [1, 2, EOS] is cut to [1], the row's own.
    long_prompt = encoded([7, 7, 7], [1], cut=[2], row=0)
    short_prompt = encoded([8], [1, 2, EOS], row=1)
    ring = ring_of_two(tmp_path, long_prompt, short_prompt)
    unit = build_unit(ring, 0, 2, CutRule(4, EOS))
    assert unit.quarantined == {"too_long": 1}
    (row,) = read(unit)
    assert row.prompt == (8,)
    assert [(ids, cut) for ids, _, _, cut in row.branches] == [((1, 2, EOS), 0), ((1,), 2)]


def test_a_partner_of_which_only_eos_would_be_left_quarantines_its_row(tmp_path):
    long_prompt = encoded([7, 7, 7], [1], cut=[2], row=0)
    short_prompt = encoded([8], [EOS, 2, EOS], row=1)  # its text begins with the end-of-turn token
    unit = build_unit(ring_of_two(tmp_path, long_prompt, short_prompt), 0, 2, CutRule(4, EOS))
    assert unit.quarantined == {"too_long": 1}
    assert [row.prompt for row in read(unit)] == [(8,)]


def test_without_eos_nothing_is_taken_off_a_cut_partner(tmp_path):
    ring = ring_of_two(tmp_path, encoded([7, 7, 7], [1]), encoded([8], [EOS, 2]))
    rows = read(build_unit(ring, 0, 2, CutRule(4, None)))
    (long_row,) = (row for row in rows if row.prompt == (7, 7, 7))
    assert long_row.branches[1][0] == (EOS,)


def test_a_unit_may_lose_all_its_rows(tmp_path):
    ring = ring_of_two(tmp_path, encoded([7, 7, 7], [1], cut=[2]), encoded([8], [1, 2, EOS]))
    rows = all_rows(ring)
    place = next(index for index, row in enumerate(rows) if row.prompt == (7, 7, 7))
    unit = build_unit(ring, place, place + 1, CutRule(4, EOS))
    assert (len(unit.rows), unit.quarantined) == (0, {"too_long": 1})
    assert len(unit.rows.completions) == 0


@relaxed
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(1, 90),
)
def test_units_cover_the_ring_once_and_keep_both_caps(folder, sizes, num_pairs, rows, tokens):
    records = [
        encoded([index + 10] * prompt, [1] * size) for index, (prompt, size) in enumerate(sizes)
    ]
    ring, _ = make_ring(folder(), records)
    offsets = unit_offsets(
        ring.spool, num_pairs=num_pairs, rows_per_unit=rows, tokens_per_unit=tokens
    )
    weights = [
        len(row.prompt) + (1 + num_pairs) * sum(len(branch[0]) for branch in row.branches)
        for row in all_rows(ring)
    ]
    expected, held = [0], 0
    for place, weight in enumerate(weights):
        if place > expected[-1] and (place - expected[-1] == rows or held + weight > tokens):
            expected.append(place)
            held = 0
        held += weight
    assert offsets == (*expected, len(weights))
