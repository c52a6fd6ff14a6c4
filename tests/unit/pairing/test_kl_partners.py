"""KL partners: none of the own prompt, none of the own text, each used once where counts allow."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.stages.pairing.kl_partners import NONE, choose_partners


def keys_of(run_lengths, texts, *, seed=0):
    """Completions in key order: runs of one prompt each, with texts drawn from so many."""
    random = np.random.default_rng(seed)
    prompts = np.sort(random.integers(0, 2**63, len(run_lengths)).astype(np.uint64))
    prompt_keys = np.repeat(prompts, run_lengths)
    return prompt_keys, random.integers(0, texts, len(prompt_keys)).astype(np.uint64)


def choose(prompts, texts, *, num_pairs, own=None):
    """The partners, each of which is allowed; one that is missing cannot be had."""
    chosen = choose_partners(prompts, texts, own or len(prompts), num_pairs)
    for row in chosen:
        for mine, theirs in enumerate(row.tolist()):
            fits = (prompts != prompts[mine]) & (texts != texts[mine])
            assert fits[theirs] if theirs != NONE else not fits.any()
    return chosen


def uses_beyond_first(row):
    return sum(count - 1 for count in Counter(row.tolist()).values())


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=150),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_every_completion_is_used_once_for_each_k(runs, pairs, seed):
    partners = choose(*keys_of(runs, 10**15, seed=seed), num_pairs=pairs)
    for row in partners:
        if 2 * max(runs) <= sum(runs):
            assert sorted(row.tolist()) == list(range(sum(runs)))
        else:
            assert NONE not in row


@pytest.mark.parametrize("texts", [2, 3, 10])
def test_equal_texts_under_other_prompts_are_never_paired(texts):
    for runs in ([1] * 3000, [1, 2, 3] * 500):
        partners = choose(*keys_of(runs, texts), num_pairs=2)
        assert NONE not in partners
        if texts > 2:
            assert [uses_beyond_first(row) for row in partners] == [0, 0]


def test_a_partner_is_repeated_only_as_often_as_the_counts_force():
    prompts, _ = keys_of([1] * 1000, 2)
    texts = np.array([0] * 600 + [1] * 400, dtype=np.uint64)
    np.random.default_rng(0).shuffle(texts)
    (row,) = choose(prompts, texts, num_pairs=1)
    # 600 completions "0" need partners among 400 completions "1": 200 cannot be new.
    assert 200 <= uses_beyond_first(row) <= 220


def test_the_first_partner_does_not_depend_on_how_many_are_asked_for():
    keys = keys_of([1, 2, 3] * 100, 10**15)
    one, three = (choose(*keys, num_pairs=pairs) for pairs in (1, 3))
    assert (one[0] == three[0]).all()
    assert len({tuple(row) for row in three.tolist()}) == 3


def test_an_added_row_changes_partners_near_itself_only():
    prompts, texts = keys_of([2] * 4000, 10**15)
    extra = np.uint64(prompts[4000] + np.uint64(1))
    more_prompts = np.insert(prompts, 4002, [extra, extra])
    more_texts = np.insert(texts, 4002, [7, 8]).astype(np.uint64)
    before = choose(prompts, texts, num_pairs=1)[0]
    after = choose(more_prompts, more_texts, num_pairs=1)[0]
    old = dict(zip(texts.tolist(), texts[before].tolist(), strict=True))
    new = dict(zip(more_texts.tolist(), more_texts[after].tolist(), strict=True))
    changed = [text for text, partner in old.items() if new[text] != partner]
    assert len(changed) <= 4
    where = np.flatnonzero(np.isin(texts, np.array(changed, dtype=np.uint64)))
    assert all(abs(place - 4002) < 1000 for place in where.tolist())


def test_where_nobody_fits_there_is_no_partner():
    prompts, _ = keys_of([1] * 10, 2)
    assert (choose(prompts, np.zeros(10, dtype=np.uint64), num_pairs=1) == NONE).all()
    # Two prompts: each completion has one possible partner, whatever k.
    partners = choose(*keys_of([1, 1], 10**15), num_pairs=3)
    assert partners.tolist() == [[1, 0]] * 3


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=60),
    st.integers(1, 4),
    st.sampled_from([2, 10**15]),
)
def test_borrowed_completions_are_partners_and_get_none(own, borrowed, pairs, texts):
    keys = keys_of([*own, *borrowed], texts)
    chosen = choose(*keys, num_pairs=pairs, own=sum(own))
    assert chosen.shape == (pairs, sum(own))
    if sum(own) - 2 * max(own) + 1 >= pairs and texts > 2:
        for row in chosen:  # these need no others
            assert sorted(row.tolist()) == list(range(sum(own)))
