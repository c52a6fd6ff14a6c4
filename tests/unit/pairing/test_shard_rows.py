"""A shard's rows with their KL partners, one row at a time."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from align.schemas.rows import Role
from align.stages.pairing import shard_rows
from align.stages.pairing.kl_partners import NONE, choose_partners
from support.encoded_rows import encoded, plain_of, record_lists, shards_of

EOS = 9
STOPS = frozenset({EOS})

relaxed = settings(max_examples=30)


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
            more = {"cut": cut, "turns": turns, "scores": (0.5, None)}
            records.append(encoded(prompt, *completions, row=row, **more))
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


def by_hand(rows, num_pairs, max_length):
    """Each row with its KL completions, or None where one cannot be had.

    And how many of these are another's than the partner's own.
    """
    every = [
        (completion[0], completion[3], turns, row.prompt)
        for row in rows
        for completion, turns in zip(row.completions, row.turns, strict=True)
    ]
    prompts = [row.place for row in rows for _ in row.completions]
    texts = [key for row in rows for key in row.completion_keys]
    keys = np.array(prompts, np.uint64), np.array(texts, np.uint64)
    partners = choose_partners(*keys, len(every), num_pairs)
    result, replaced, first = [], 0, 0
    for row in rows:
        completions, turns = list(row.completions), list(row.turns)
        possible = True
        for k in range(num_pairs):
            for place, (own, *_) in enumerate(row.completions):
                partner = int(partners[k, first + place])
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
                fitting = [] if partner == NONE else fitting
                completions += [completion for _, completion, _ in fitting[:1]]
                turns += [learned for _, _, learned in fitting[:1]]
                replaced += bool(fitting) and fitting[0][0] > 0
                possible &= bool(fitting)
        whole_row = row._replace(completions=tuple(completions), turns=tuple(turns))
        result.append(whole_row if possible else None)
        first += len(row.completions)
    return result, replaced


@relaxed
@given(st.data(), st.integers(2, 9), st.integers(0, 3), st.sampled_from([1, 3, 256]))
def test_a_row_holds_its_own_completions_then_its_partners(
    new_folder, data, max_length, num_pairs, window
):
    records = data.draw(fitted_records(max_length=max_length))
    assume(len(records) > 1)
    shards = shards_of(new_folder(), records, num_pairs=num_pairs)
    rows = shards.all_rows()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_rows, "SEARCH_WINDOW", window)
        shard = shards.build(max_length=max_length, stops=STOPS)
    expected, replaced = by_hand(rows, num_pairs, max_length)
    good = [row for row in expected if row]
    assert plain_of(shard) == [row._replace(place=None, completion_keys=None) for row in good]
    bad = [row.source for row, whole in zip(rows, expected, strict=True) if not whole]
    assert [(row.file, row.row) for row in shard.rejected] == bad
    assert {row.reason for row in shard.rejected} <= {"no_mismatch"}
    assert bad or shard.notes["mismatched_completions_replaced_after_cutting"] == replaced
    assert shard.first_key == f"{rows[0].place:016x}"
    assert shard.last_key == f"{rows[-1].place:016x}"


@relaxed
@given(record_lists(prompts=12), st.integers(1, 3), st.integers(1, 12))
def test_partners_in_many_shards_are_of_other_prompts_and_texts(
    new_folder, records, num_pairs, ranges
):
    how = {"ranges": ranges, "num_pairs": num_pairs, "carried": ("weight",)}
    shards = shards_of(new_folder(), records, **how)
    every = [
        (row.prompt, completion[0]) for row in shards.all_rows() for completion in row.completions
    ]
    made = [shards.build(number) for number in range(ranges) if shards.rows.read(number, Counter())]
    rejected = {one.row for shard in made for one in shard.rejected}
    for row in (row for shard in made for row in plain_of(shard)):
        own = len(row.completions) // (1 + num_pairs)
        for place, completion in enumerate(row.completions[own:]):
            mine = row.completions[place % own][0]
            theirs = {prompt for prompt, ids in every if ids == completion[0]}
            assert completion[1] == Role.MISMATCHED
            assert completion[0] != mine
            assert theirs - {row.prompt}
    for number, record in enumerate(records):
        own = tuple(record.prompt)
        can = [
            any(prompt != own and ids != tuple(mine) for prompt, ids in every)
            for mine in record.completions
        ]
        assert (number in rejected) == (not all(can))


def test_a_shard_of_few_rows_borrows_the_same_ranges_whoever_makes_it(tmp_path):
    """Five rows a shard: own completions are used once for each k where they allow it."""
    records = [encoded([row, 1], [row, 2], [row, 3], row=row) for row in range(200)]
    how = {"ranges": 40, "num_pairs": 2}
    one, other = (shards_of(tmp_path, some, **how) for some in (records, records[::-1]))
    used = Counter()
    for number in range(40):
        if one.rows.read(number, Counter()) is None:
            continue
        rows = plain_of(one.build(number))
        again = plain_of(other.build(number))
        assert [row._replace(source=None) for row in rows] == [
            row._replace(source=None) for row in again
        ]
        used.update(completion[0] for row in rows for completion in row.completions[2:])
    assert used.total() == 2 * 400
    assert max(used.values()) <= 2 * 4


def two(folder, one, other):
    """Two prompts with one completion each: they can only be each other's partners."""
    return shards_of(folder, [one, other], num_pairs=1)


def test_a_row_without_another_text_is_rejected_alone(tmp_path):
    # Behind three tokens of prompt one token fits: [1, 2, EOS] is cut to [1], the row's own.
    long_prompt = encoded([7, 7, 7], [1], cut=[2], row=0)
    short_prompt = encoded([8], [1, 2, EOS], row=1)
    shard = two(tmp_path, long_prompt, short_prompt).build(max_length=4, stops=STOPS)
    (bad,) = shard.rejected
    assert (bad.file, bad.row, bad.reason) == (0, 0, "no_mismatch")
    assert "max_length" in bad.detail
    (row,) = plain_of(shard)
    assert row.prompt == (8,)
    assert [(ids, cut) for ids, _, _, cut in row.completions] == [((1, 2, EOS), 0), ((1,), 2)]
    # And where the only partner has nothing left but EOS, which is taken off if it is one.
    shards = two(tmp_path, long_prompt, encoded([8], [EOS, 2, EOS], row=1))
    for stops, left in ((STOPS, [(8,)]), (frozenset(), [(7, 7, 7), (8,)])):
        rows = plain_of(shards.build(max_length=4, stops=stops))
        assert sorted(row.prompt for row in rows) == left


def test_a_partner_without_learned_tokens_is_replaced(tmp_path):
    """Behind three tokens of prompt two fit; of [1, 2, 3] the third alone is learned."""
    turns = np.array([0, 0, 1], np.int16)
    long_prompt = encoded([7, 7, 7], [4, EOS], row=0)
    partner = encoded([8], [1, 2, 3], row=1, turns=[turns])
    shard = two(tmp_path, long_prompt, partner).build(max_length=5, stops=STOPS)
    assert [(bad.row, bad.reason) for bad in shard.rejected] == [(0, "no_mismatch")]
    other = encoded([9], [5, 6, 6], row=2, turns=[turns[::-1]])
    shards = shards_of(tmp_path, [long_prompt, partner, other], num_pairs=1)
    rows = plain_of(shards.build(max_length=5, stops=STOPS))
    (row,) = (row for row in rows if row.prompt == (7, 7, 7))
    assert (row.completions[1][0], row.turns[1]) == ((5, 6), (1, 0))


def test_one_prompt_of_forty_percent_uses_the_others_about_equally_often(tmp_path):
    large = [encoded([1], [row, 5], row=row) for row in range(400)]
    others = [encoded([10 + row], [row, 6], row=400 + row) for row in range(600)]
    shards = shards_of(tmp_path, [*large, *others], ranges=16, num_pairs=4)
    uses = Counter()
    for number in range(16):
        shard = shards.build(number)
        assert not shard.rejected
        for row in plain_of(shard):
            if row.prompt == (1,):
                uses.update(ids for ids, *_ in row.completions[len(row.completions) // 5 :])
    assert {last for _, last in uses} == {6}
    assert max(uses.values()) <= 2 * -(-4 * 400 // len(uses))
