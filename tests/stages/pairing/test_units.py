"""Partners on the ring, its arcs and the mismatched branches in them, one row at a time."""

import mmap
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from align.schemas.errors import BadDataError
from align.schemas.row_keys import KeyedRows
from align.schemas.rows import Role
from align.stages.pairing import kl_partners
from align.stages.pairing import kl_partners as module
from align.stages.pairing.fitted_partners import CutRule
from align.stages.pairing.kl_partners import Repeats, choose_partners
from align.stages.pairing.units import build_unit, unit_offsets
from align.stages.storage.cache import shards
from align.stages.storage.cache.spool import new_map
from support.encoded_rows import all_rows, encoded, make_ring, plain

EOS = 9
STOPS = frozenset({EOS})

relaxed = settings(max_examples=60)


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
        turns = [draw(turns_of(len(ids))) for ids in completions]
        if all(completions):
            records.append(encoded(prompt, *completions, cut=cut, row=row, turns=turns))
    return records


def turns_of(length):
    """Nothing said of a completion, or what of it is learned: at least one token."""
    numbers = st.lists(st.sampled_from([0, 1]), min_size=length, max_size=length)
    is_learned = numbers.filter(lambda drawn: max(drawn, default=0) > 0)
    told = is_learned.map(lambda drawn: np.array(drawn, np.int16))
    return st.one_of(st.none(), told) if length else st.none()


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
    every = [
        (branch[0], branch[3], turns, row.prompt)
        for row in rows
        for branch, turns in zip(row.branches, row.turns, strict=True)
    ]
    first = sum(len(row.branches) for row in rows[:start])
    result, replaced = [], 0
    for row in rows[start:stop]:
        branches, turns = list(row.branches), list(row.turns)
        possible = True
        for k in range(ring.num_pairs):
            for place, (own, *_) in enumerate(row.branches):
                number = first + place
                partner = int(ring.partners(number, number + 1)[k, 0])
                following = enumerate(every[partner:] + every[:partner])
                fitting = [
                    (
                        steps,
                        (fitted, int(Role.MISMATCHED), None, cut + len(whole) - len(fitted)),
                        learned[: len(fitted)],
                    )
                    for steps, (whole, cut, learned, prompt) in following
                    if (fitted := fit(whole, max_length - len(row.prompt)))
                    and max(learned[: len(fitted)]) > 0
                    and fitted != own
                    and prompt != row.prompt
                ]
                branches += [branch for _, branch, _ in fitting[:1]]
                turns += [learned for _, _, learned in fitting[:1]]
                replaced += bool(fitting) and fitting[0][0] > 0
                possible &= bool(fitting)
        whole_row = row._replace(branches=tuple(branches), turns=tuple(turns))
        result.append(whole_row if possible else None)
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
    for stops, left in ((STOPS, [(8,)]), (frozenset(), [(7, 7, 7), (8,)])):
        assert sorted(row.prompt for row in read(build_unit(ring, 0, 2, CutRule(4, stops)))) == left


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


def test_a_partner_whose_learned_tokens_are_cut_off_is_replaced_or_leaves_its_row_out(tmp_path):
    """Behind three tokens of prompt two fit; of [1, 2, 3] the third alone is learned."""
    turns = np.array([0, 0, 1], np.int16)
    long_prompt = encoded([7, 7, 7], [4, EOS], row=0)
    partner = encoded([8], [1, 2, 3], row=1, turns=[turns])
    ring = ring_of_two(tmp_path / "two", long_prompt, partner)
    unit = build_unit(ring, 0, 2, CutRule(5, STOPS))
    assert [(bad.row, bad.reason) for bad in unit.rejected] == [(0, "no_mismatch")]
    other = encoded([9], [5, 6, 6], row=2, turns=[turns[::-1]])
    ring, _ = make_ring(tmp_path / "three", [long_prompt, partner, other], num_pairs=1)
    rows = read(build_unit(ring, 0, 3, CutRule(5, STOPS)))
    (row,) = (row for row in rows if row.prompt == (7, 7, 7))
    assert (row.branches[1][0], row.turns[1]) == ((5, 6), (1, 0))


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


class Chosen(NamedTuple):
    indices: np.ndarray
    repeats: Repeats


def choose(prompt_keys, completion_keys, *, num_pairs):
    indices = np.full((num_pairs, len(prompt_keys)), -1)
    return Chosen(indices, choose_partners(prompt_keys, completion_keys, list(indices)))


def choose_on_disk(path, prompt_keys, completion_keys, *, num_pairs):
    with new_map(path, 8 * (2 + num_pairs) * len(prompt_keys)) as mapped:
        numbers = np.frombuffer(mapped, dtype="<u8").reshape(2 + num_pairs, -1)
        numbers[:2] = prompt_keys, completion_keys
        forgotten = []

        def forget():
            forgotten.append(mapped.madvise(mmap.MADV_DONTNEED))

        partners = numbers[2:].view("<i8")
        repeats = choose_partners(numbers[0], numbers[1], list(partners), forget=forget)
        # Once a span for the blocks and for what is met again, and for each k.
        assert len(forgotten) >= (1 + num_pairs) * len(prompt_keys) / module.SPAN
        (file,) = path.parent.glob(f".{path.name}.*.tmp")
        stored = np.fromfile(file, dtype="<i8").reshape(numbers.shape)
    return Chosen(stored[2:], repeats)


def ring(run_lengths, texts, *, seed=0):
    """Completions in ring order: runs of one prompt each, with texts drawn from so many."""
    random = np.random.default_rng(seed)
    prompts = np.sort(random.integers(0, 2**63, len(run_lengths)).astype(np.uint64))
    prompt_keys = np.repeat(prompts, run_lengths)
    return prompt_keys, random.integers(0, texts, len(prompt_keys)).astype(np.uint64)


def are_allowed(prompt_keys, completion_keys, row):
    """One completion at a time: whether its partner is allowed."""
    return [
        prompt_keys[mine] != prompt_keys[theirs]
        and completion_keys[mine] != completion_keys[theirs]
        for mine, theirs in enumerate(row.tolist())
    ]


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=150),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_every_completion_is_somebodys_mismatch_once_and_never_its_own_prompts(runs, pairs, seed):
    prompt_keys, completion_keys = ring(runs, 10**15, seed=seed)
    if 2 * max(runs) > sum(runs):
        with pytest.raises(BadDataError, match="One prompt holds"):
            choose(prompt_keys, completion_keys, num_pairs=pairs)
        return
    partners = choose(prompt_keys, completion_keys, num_pairs=pairs)
    assert partners.repeats.used_twice == 0
    for row in partners.indices:
        assert sorted(row.tolist()) == list(range(sum(runs)))
        assert all(are_allowed(prompt_keys, completion_keys, row))


@pytest.mark.parametrize("texts", [2, 3, 10])
def test_equal_texts_under_other_prompts_are_never_paired(texts):
    for runs in ([1] * 3000, [1, 2, 3] * 500):
        prompt_keys, completion_keys = ring(runs, texts)
        partners = choose(prompt_keys, completion_keys, num_pairs=2)
        for row in partners.indices:
            assert all(are_allowed(prompt_keys, completion_keys, row))
        if texts > 2:
            assert partners.repeats.used_twice == 0


def test_a_partner_is_repeated_only_as_often_as_the_counts_force():
    prompt_keys, _ = ring([1] * 1000, 2)
    completion_keys = np.array([0] * 600 + [1] * 400, dtype=np.uint64)
    np.random.default_rng(0).shuffle(completion_keys)
    partners = choose(prompt_keys, completion_keys, num_pairs=1)
    assert all(are_allowed(prompt_keys, completion_keys, partners.indices[0]))
    # 600 completions "0" need partners among 400 completions "1": 200 cannot be new.
    assert 200 <= partners.repeats.used_twice <= 220


def test_the_first_partner_does_not_depend_on_how_many_are_asked_for():
    keys = ring([1, 2, 3] * 100, 10**15)
    one, three = (choose(*keys, num_pairs=pairs).indices for pairs in (1, 3))
    assert (one[0] == three[0]).all()
    assert len({tuple(row) for row in three.tolist()}) == 3


def test_an_added_row_changes_partners_near_itself_only():
    prompt_keys, completion_keys = ring([2] * 4000, 10**15)
    extra = np.uint64(prompt_keys[4000] + np.uint64(1))
    more_prompts = np.insert(prompt_keys, 4002, [extra, extra])
    more_completions = np.insert(completion_keys, 4002, [7, 8]).astype(np.uint64)
    before = choose(prompt_keys, completion_keys, num_pairs=1).indices[0]
    after = choose(more_prompts, more_completions, num_pairs=1).indices[0]
    old = dict(zip(completion_keys.tolist(), completion_keys[before].tolist(), strict=True))
    new = dict(zip(more_completions.tolist(), more_completions[after].tolist(), strict=True))
    changed = [text for text, partner in old.items() if new[text] != partner]
    assert len(changed) <= 4
    where = np.flatnonzero(np.isin(completion_keys, np.array(changed, dtype=np.uint64)))
    assert all(abs(place - 4002) < 1000 for place in where.tolist())


def test_one_text_for_all_is_an_error_and_partners_met_again_under_another_k_are_counted():
    prompt_keys, _ = ring([1] * 10, 2)
    with pytest.raises(BadDataError, match="the same text"):
        choose(prompt_keys, np.zeros(10, dtype=np.uint64), num_pairs=1)
    # Two prompts: each completion has one possible partner, whatever k.
    prompt_keys, completion_keys = ring([1, 1], 10**15)
    partners = choose(prompt_keys, completion_keys, num_pairs=3)
    assert partners.indices.tolist() == [[1, 0]] * 3
    assert partners.repeats == Repeats(used_twice=0, met_again=4)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=8, max_size=200),
    st.sampled_from([3, 9, 10**15]),
    st.integers(1, 3),
    st.integers(1, 70),
)
def test_the_spans_worked_on_leave_no_trace_in_memory_or_on_disk(
    tmp_path_factory, runs, texts, pairs, span
):
    keys = ring([*runs, *runs], texts)
    assume(len(np.unique(keys[1])) > 1)
    whole = choose(*keys, num_pairs=pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SPAN", span)
        in_memory = choose(*keys, num_pairs=pairs)
        on_disk = choose_on_disk(
            tmp_path_factory.mktemp("numbers") / "keys", *keys, num_pairs=pairs
        )
    assert whole.repeats == in_memory.repeats == on_disk.repeats
    assert np.array_equal(whole.indices, in_memory.indices)
    assert np.array_equal(whole.indices, on_disk.indices)
