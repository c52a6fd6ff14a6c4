import mmap
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from align.schemas.errors import BadDataError
from align.stages.pairing import kl_partners as module
from align.stages.pairing.kl_partners import Repeats, choose_partners
from align.stages.storage.spool import new_map


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


def by_hand(prompt_keys, completion_keys, row):
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
        assert all(by_hand(prompt_keys, completion_keys, row))


@pytest.mark.parametrize("texts", [2, 3, 10])
def test_equal_texts_under_other_prompts_are_never_paired(texts):
    for runs in ([1] * 3000, [1, 2, 3] * 500):
        prompt_keys, completion_keys = ring(runs, texts)
        partners = choose(prompt_keys, completion_keys, num_pairs=2)
        for row in partners.indices:
            assert all(by_hand(prompt_keys, completion_keys, row))
        if texts > 2:
            assert partners.repeats.used_twice == 0


def test_a_partner_is_repeated_only_as_often_as_the_counts_force():
    prompt_keys, _ = ring([1] * 1000, 2)
    completion_keys = np.array([0] * 600 + [1] * 400, dtype=np.uint64)
    np.random.default_rng(0).shuffle(completion_keys)
    partners = choose(prompt_keys, completion_keys, num_pairs=1)
    assert all(by_hand(prompt_keys, completion_keys, partners.indices[0]))
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


def test_one_text_for_all_other_prompts_is_an_error_that_says_why():
    prompt_keys, _ = ring([1] * 10, 2)
    with pytest.raises(BadDataError, match="the same text"):
        choose(prompt_keys, np.zeros(10, dtype=np.uint64), num_pairs=1)


def test_partners_met_again_under_another_k_are_counted():
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
