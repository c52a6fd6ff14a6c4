"""Arcs of the ring and the mismatched branches in them, against one row at a time."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from align.schemas.errors import BadDataError
from align.schemas.row_keys import KeyedRows
from align.schemas.rows import Role
from align.stages.pairing import kl_partners
from align.stages.pairing.kl_partners import CutRule
from align.stages.pairing.units import build_unit, unit_offsets
from align.stages.storage import shards
from support.encoded_rows import all_rows, encoded, make_ring, plain

EOS = 9
STOPS = frozenset({EOS})

relaxed = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


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
    """Each row of an arc with its mismatched branches, or None where one cannot be had.

    And how many of these are another's than the partner's own.
    """
    every = [(branch[0], branch[3], row.prompt) for row in rows for branch in row.branches]
    first = sum(len(row.branches) for row in rows[:start])
    result, replaced = [], 0
    for row in rows[start:stop]:
        branches = list(row.branches)
        possible = True
        for k in range(ring.num_pairs):
            for place, (own, *_) in enumerate(row.branches):
                number = first + place
                partner = int(ring.partners(number, number + 1)[k, 0])
                fitting = [
                    (steps, (fitted, int(Role.MISMATCHED), None, cut + len(whole) - len(fitted)))
                    for steps, (whole, cut, prompt) in enumerate(every[partner:] + every[:partner])
                    if (fitted := fit(whole, max_length - len(row.prompt)))
                    and fitted != own
                    and prompt != row.prompt
                ]
                branches += [branch for _, branch in fitting[:1]]
                replaced += bool(fitting) and fitting[0][0] > 0
                possible &= bool(fitting)
        result.append(row._replace(branches=tuple(branches)) if possible else None)
        first += len(row.branches)
    return result, replaced


def read(unit):
    keys = [0] * len(unit.rows)
    keyed = KeyedRows(unit.rows, keys, [0] * len(unit.rows.completions))
    return [row._replace(place=None, completion_keys=None) for row in plain(keyed)]


@pytest.mark.slow
@relaxed
@given(st.data(), st.integers(2, 9), st.integers(0, 3), st.sampled_from([1, 3, 256]))
def test_a_unit_holds_each_rows_own_branches_then_its_partners_k_by_k(
    new_folder, data, max_length, num_pairs, window
):
    records = data.draw(fitted_records(max_length=max_length))
    assume(len(records) > 1)
    try:
        ring, _ = make_ring(new_folder(), records, num_pairs=num_pairs)
    except BadDataError:
        assume(False)
    rows = all_rows(ring)
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kl_partners, "SEARCH_WINDOW", window)
        unit = build_unit(ring, start, stop, CutRule(max_length, STOPS))
    expected, replaced = by_hand(ring, rows, start, stop, max_length)
    good = [row for row in expected if row]
    assert read(unit) == [row._replace(place=None, completion_keys=None) for row in good]
    bad = [row.source for row, whole in zip(rows[start:stop], expected, strict=True) if not whole]
    assert [(row.file, row.row) for row in unit.rejected] == bad
    assert {row.reason for row in unit.rejected} <= {"no_mismatch"}
    assert bad or unit.replaced == replaced
    assert unit.first_key == f"{rows[start].place:016x}"
    assert unit.last_key == f"{rows[stop - 1].place:016x}"


def ring_of_two(folder, one, other):
    """Two prompts with one completion each: they can only be each other's partners."""
    return make_ring(folder, [one, other], num_pairs=1)[0]


def test_a_row_for_which_no_partner_is_another_text_when_cut_is_rejected_alone(tmp_path):
    # Behind three tokens of prompt one token fits: [1, 2, EOS] is cut to [1], the row's own.
    long_prompt = encoded([7, 7, 7], [1], cut=[2], row=0)
    short_prompt = encoded([8], [1, 2, EOS], row=1)
    ring = ring_of_two(tmp_path / "one", long_prompt, short_prompt)
    unit = build_unit(ring, 0, 2, CutRule(4, STOPS))
    (bad,) = unit.rejected
    assert (bad.file, bad.row, bad.reason) == (0, 0, "no_mismatch")
    assert bad.detail.startswith("room for 1 tokens behind the prompt: cut to that, none of the 1 ")
    (row,) = read(unit)
    assert row.prompt == (8,)
    assert [(ids, cut) for ids, _, _, cut in row.branches] == [((1, 2, EOS), 0), ((1,), 2)]
    # A unit may lose all its rows.
    (place,) = (index for index, row in enumerate(all_rows(ring)) if row.prompt == (7, 7, 7))
    unit = build_unit(ring, place, place + 1, CutRule(4, STOPS))
    assert (len(unit.rows), len(unit.rows.completions), unit.replaced) == (0, 0, 0)
    assert [bad.reason for bad in unit.rejected] == ["no_mismatch"]
    # And where the only partner has nothing left but EOS, which is taken off if it is one.
    ring = ring_of_two(tmp_path / "two", long_prompt, encoded([8], [EOS, 2, EOS], row=1))
    unit = build_unit(ring, 0, 2, CutRule(4, STOPS))
    assert [bad.reason for bad in unit.rejected] == ["no_mismatch"]
    assert [row.prompt for row in read(unit)] == [(8,)]
    rows = read(build_unit(ring, 0, 2, CutRule(4, frozenset())))
    assert [row.branches[1][0] for row in rows if row.prompt == (7, 7, 7)] == [(EOS,)]


@pytest.mark.parametrize("seed", range(6))
def test_neither_a_partner_nor_what_stands_in_for_one_answers_the_same_prompt(tmp_path, seed):
    # Behind three tokens of prompt one token fits; of other texts but the own only [3] is another.
    others = [encoded([10 + row], [1, row + 2, EOS], row=row) for row in range(1, 10)]
    one = [
        encoded([7, 7, 7], [1], cut=[2], text="the same"),
        encoded([7, 7], [2, 5], text="the same", row=20),
    ]
    ring, _ = make_ring(tmp_path, [*one, *others, encoded([30], [3])], num_pairs=1, seed=seed)
    rows = read(build_unit(ring, 0, len(ring.rows), CutRule(4, STOPS)))
    (long_row,) = (row for row in rows if row.prompt == (7, 7, 7))
    (short_row,) = (row for row in rows if row.prompt == (7, 7))
    assert long_row.branches[1][0] == (3,)
    assert short_row.branches[1][0] != (1,)


def test_the_search_for_another_text_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(kl_partners, "MOST_SEARCHED", 3)
    records = [encoded([7, 7, 7], [1], [1], cut=[2, 2])]
    records += [encoded([10 + row], [1, row + 2, EOS], row=row) for row in range(1, 10)]
    ring, _ = make_ring(tmp_path, records, num_pairs=2)
    unit = build_unit(ring, 0, len(ring.rows), CutRule(4, STOPS))
    assert [(bad.row, bad.reason) for bad in unit.rejected] == [(0, "no_mismatch")]
    assert "none of the 3 completions" in unit.rejected[0].detail


@relaxed
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(1, 90),
    st.integers(1, 9),
)
def test_units_cover_the_ring_once_and_keep_both_caps(
    new_folder, sizes, num_pairs, rows, tokens, weighed
):
    records = [
        encoded([index + 10] * prompt, [1] * size) for index, (prompt, size) in enumerate(sizes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "ROWS_PER_GROUP", weighed)
        ring, _ = make_ring(new_folder(), records, ranges=weighed)
    offsets = unit_offsets(
        ring.sizes(), num_pairs=num_pairs, rows_per_unit=rows, tokens_per_unit=tokens
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
