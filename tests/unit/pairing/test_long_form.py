"""One row per completion becomes one row per prompt, wherever the rows stood."""

from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from align.schemas.rows import Role
from align.stages.data.row_keys import key_rows
from align.stages.pairing import partition
from align.stages.pairing.long_form import merge_same_prompts
from support.encoded_rows import encoded, plain, shards_of, token_lists

PLAIN = {"carried": ()}


def long_row(prompt, completion, score, *, weight=1.0, row=0):
    return encoded(
        prompt,
        completion,
        roles=(Role.CANDIDATE,),
        scores=(score,),
        carried={"weight": weight},
        row=row,
    )


@st.composite
def long_rows(draw):
    pool = draw(st.lists(token_lists(most=3), min_size=1, max_size=6))
    row = st.tuples(st.sampled_from(pool), token_lists(), st.sampled_from([0.0, 0.5, 1.0]))
    weights = st.sampled_from([1.0, 2.0])
    return [
        long_row(*each, weight=draw(weights), row=index)
        for index, each in enumerate(draw(st.lists(row, min_size=1, max_size=25)))
    ]


# Three rows of each of four prompts, one after the other: every portion has some of a prompt.
THRICE = [long_row((n % 4,), (n,), 0.5, row=n) for n in range(12)]


@settings(max_examples=30)
@given(long_rows(), st.randoms(), st.integers(1, 6), st.sampled_from([1, 60, 10**6]))
@example(THRICE, Random(0), 1, 1)
def test_rows_of_one_prompt_become_one_in_any_order(new_folder, records, shuffler, chunk, tokens):
    shards = shards_of(new_folder(), records, joins="left", carried=("weight",))
    rows, notes = shards.all_rows(), shards.notes
    by_hand, weights = defaultdict(Counter), defaultdict(set)
    for each in records:
        weights[tuple(each.prompt)].add(each.text_row.carried["weight"])
        by_hand[tuple(each.prompt)][tuple(each.completions[0]), each.text_row.scores[0]] += 1
    found = {
        row.prompt: Counter((ids, score) for ids, _, score, _ in row.completions) for row in rows
    }
    assert found == by_hand
    assert len(rows) == len(by_hand)
    assert all(role == Role.CANDIDATE for row in rows for _, role, _, _ in row.completions)
    assert notes["rows_joined_by_prompt"] == len(records) - len(rows)
    assert notes["prompts_with_more_than_one_weight"] == sum(len(w) > 1 for w in weights.values())

    shuffled = records[:]
    shuffler.shuffle(shuffled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "TOKENS_PER_PORTION", tokens)
        how = {"chunk": chunk, "per_file": 7, "ranges": chunk, "joins": "left"}
        again = shards_of(new_folder(), shuffled, **how, carried=("weight",)).all_rows()
    once, twice = ([row._replace(source=None) for row in some] for some in (rows, again))
    assert once == twice


def test_a_joined_row_has_an_id_of_all_its_rows(tmp_path):
    def joined_of(*completions, score=0.5):
        records = [long_row([1], [ids], score, row=row) for row, ids in enumerate(completions)]
        (row,) = shards_of(tmp_path, records, joins="left").all_rows()
        return row

    row = joined_of(*range(5))
    assert (row.source[1],) == row.completions[0][0]
    ids = {joined_of(2, 3, last).row_id for last in range(4, 12)}
    assert len(ids | {joined_of(2, 3).row_id}) == 9
    alone, other, again = (joined_of(2, score=n % 2).row_id for n in (1, 2, 3))
    assert alone == again != other


def joined(*rows, side="left", limit=None):
    """One prompt; each row its ids before cutting and its completion: what becomes of them."""
    records = []
    for place, (prompt, completion) in enumerate(rows):
        kept, cut = cut_prompt(prompt, side, limit)
        row = long_row(kept, completion, 0.5, row=place)
        record = replace(row.text_row, prompt="the same text", carried={})
        records.append(replace(row, text_row=record, prompt_cut=cut))
    notes = Counter()
    keyed = key_rows(records, **PLAIN).in_key_order()
    merged = merge_same_prompts(keyed, notes, prompt_side=side)
    found = []
    for row in plain(merged):
        ids = [ids for ids, *_ in row.completions]  # with what they got of their prompt
        (alone,) = plain(key_rows([encoded([1], *ids)], **PLAIN))
        assert row.completion_keys == alone.completion_keys
        found.append((row.prompt, row.prompt_cut, sorted(ids)))
    return found, notes


def cut_prompt(prompt, side, limit):
    """As the encoder cuts; BOS stays in front."""
    if limit is None or len(prompt) <= limit:
        return prompt, 0
    cut = len(prompt) - limit
    if side == "right":
        return prompt[:limit], cut
    return ([BOS, *prompt[cut + 1 :]] if prompt[0] == BOS else prompt[cut:]), cut


BOS = 99
SHORT, LONG = [BOS, 1, 2, 3, 4], [BOS, 1, 2, 3, 4, 5]  # 5 is the blank that a word takes over


def test_the_prompt_of_a_group_is_what_all_its_rows_begin_with():
    found, notes = joined((SHORT, [7]), (LONG, [8]), ([BOS, 1, 2, 3, 6], [9]))
    assert found == [((BOS, 1, 2, 3), 0, [(4, 5, 8), (4, 7), (6, 9)])]
    assert notes["prompts_shortened_to_what_all_completions_share"] == 1


def test_prompts_cut_at_their_beginning_are_aligned():
    # [BOS 2 3 4] and [BOS 3 4 5]; the other limits are those of any text below.
    found, _ = joined((SHORT, [7]), (LONG, [8]), limit=4)
    assert found == [((BOS, 3, 4), 2, [(5, 8), (7,)])]
    # Prompts of which cutting left nothing in common stay apart.
    found, notes = joined((SHORT[1:], [7]), (LONG[1:], [8]), limit=1)
    assert sorted(found) == [((4,), 3, [(7,)]), ((5,), 4, [(8,)])]
    assert notes["prompts_whose_completions_share_no_token_of_it"] == 1


def test_a_prompt_cut_at_its_end_leaves_no_hole_in_a_completion():
    rows = [(SHORT, [7]), (LONG, [8])]  # LONG has lost its 5
    assert joined(*rows, side="right", limit=5)[0] == [((BOS, 1, 2, 3, 4), 1, [(7,), (8,)])]
    rows.append(([BOS, 1, 2, 3, 6], [9]))
    expected = ((BOS, 1, 2, 3), 2, [(4, 7), (6, 9), (8,)])
    assert joined(*rows, side="right", limit=5)[0] == [expected]


def test_moved_prompt_tokens_count_as_the_first_token():
    """By hand: 4 and 5 go to completions, one of which begins with a turn that is not learned."""
    rows = [(SHORT, [7, 8], [0, 1]), (LONG, [9], [1]), ([BOS, 1, 2, 3], [9, 9], [0, 1])]
    records = [
        replace(
            long_row(prompt, completion, 0.5, row=place),
            learned=(np.array(turns, np.int16),),
            text_row=replace(long_row(prompt, completion, 0.5).text_row, prompt="text", carried={}),
        )
        for place, (prompt, completion, turns) in enumerate(rows)
    ]
    keyed = key_rows(records, **PLAIN).in_key_order()
    (row,) = plain(merge_same_prompts(keyed, Counter(), prompt_side="left"))
    found = dict(zip((ids for ids, *_ in row.completions), row.turns, strict=True))
    assert found == {(4, 7, 8): (0, 0, 1), (4, 5, 9): (1, 1, 1), (9, 9): (0, 1)}


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 3), min_size=4, max_size=8),
    st.lists(st.tuples(st.integers(0, 3), st.integers(10, 13)), min_size=2, max_size=5),
    st.booleans(),
    st.integers(4, 12),
)
def test_what_is_joined_continues_the_text_of_each_row(text, ends, has_bos, limit):
    """Each row keeps so many tokens less of the text as its prompt; the rest is its completion."""
    whole = [BOS, *text] if has_bos else text
    rows = [(whole[: len(whole) - less], [*whole[len(whole) - less :], end]) for less, end in ends]
    found, _ = joined(*rows, limit=limit)
    if len(found) > 1:
        return  # cutting left nothing in common
    ((prompt, cut, completions),) = found
    head = 1 if has_bos and cut else 0
    kept = (*whole[:head], *whole[head + cut :])
    texts = [(*kept, end) for _, end in ends]
    assert sorted(prompt + ids for ids in completions) == sorted(texts)
