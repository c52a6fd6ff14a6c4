"""Scoring a shard: plans, and the values of each completion alone, whatever the memory is."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.columns import Ragged
from align.stages.data.row_keys import key_rows
from align.stages.score import score as score_module
from align.stages.score.batch_plan import TreeCost, plan_batches, plan_trees
from align.stages.score.score import KnownScores
from support.encoded_rows import encoded
from support.faulty_scorer import Faulty

pytestmark = pytest.mark.numeric


def reasons(scores):
    return Counter(bad.reason for bad in scores.rejected)


def sums_of(completions):
    return [math.fsum(map(float, tokens)) for tokens in completions]


def block_of(*records):
    return key_rows(list(records), carried=())


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("budget", [1, 40, 100_000])
def test_sums_are_float64_of_the_float32_tokens_of_each_completion_alone(
    rows, score, one_by_one, budget, pads
):
    expected = one_by_one(rows)
    scores = score(rows, Faulty(pads=pads), budget=budget)
    for completion, tokens in enumerate(scores.block.token_logps):
        assert tokens.dtype == np.float32
        assert tokens.tobytes() == expected[completion].tobytes()
    sums = sums_of(expected)
    assert scores.block.logps.dtype == np.float64
    assert np.abs(scores.block.logps - sums).max() <= 1e-13
    assert (scores.completions, scores.reused) == (len(sums), 0)
    assert scores.rejected == ()


def test_a_sum_leaves_out_what_is_not_learned_though_its_token_is_not_finite(score):
    """The same ids three times: all learned, a part of them, and another part."""
    ids, numbers = [5, 6, 7], [None, [1, 0, 1], [0, 0, 1]]
    turns = [None if each is None else np.array(each, np.int16) for each in numbers]
    found = score(block_of(encoded([3], ids, ids, ids, turns=turns)), Faulty()).block
    tokens = [float(one) for one in found.token_logps[0]]
    expected = [math.fsum(tokens), tokens[0] + tokens[2], tokens[2]]
    assert np.abs(found.logps - expected).max() <= 1e-13
    unread = score(block_of(encoded([3], ids, turns=turns[1:2])), Faulty(poison={6: np.nan}))
    assert unread.block.logps.tolist() == found.logps[1:2].tolist()
    assert reasons(score(block_of(encoded([3], ids)), Faulty(poison={6: np.nan}))) == {
        "nonfinite_logp": 1
    }


def test_a_sum_does_not_depend_on_where_in_the_shard_the_completion_stands(score):
    long = list(np.random.default_rng(1).integers(10, 90, 1000))
    alone = score(block_of(encoded([3], long)), Faulty())
    for offset in range(1, 5):
        behind = score(block_of(encoded([3], [7] * offset, long)), Faulty())
        assert behind.block.logps[1] == alone.block.logps[0]


@pytest.mark.parametrize(
    ("room", "budget", "pads"), [(200, 128, True), (60, 32, False), (31, 16, True)]
)
def test_less_memory_halves_the_budget_and_changes_no_value(rows, score, room, budget, pads):
    plenty = score(rows, Faulty(pads=pads), budget=512)
    scarce = score(rows, Faulty(room=room, pads=pads), budget=512)
    assert scarce.tokens_per_batch == budget
    assert plenty.tokens_per_batch == 512
    assert scarce.block.logps.tobytes() == plenty.block.logps.tobytes()
    assert scarce.block.token_logps.values.tobytes() == plenty.block.token_logps.values.tobytes()
    assert scarce.rejected == ()


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("refused", [0, 1, 2, 4])
def test_no_value_depends_on_how_many_batches_are_under_way(
    rows, score, one_by_one, monkeypatch, ahead, refused
):
    """Those before a batch that does not fit are under way when it is refused, and are dropped."""
    monkeypatch.setattr(score_module, "BATCHES_AHEAD", ahead)
    heard, scorer = [], Faulty(refused=refused)
    scores = score(rows, scorer, heard=heard)
    found = b"".join(tokens.tobytes() for tokens in scores.block.token_logps)
    assert found == b"".join(tokens.tobytes() for tokens in one_by_one(rows))
    assert scores.tokens_per_batch == (32 if refused else 64)
    used = scorer.batches[refused:]
    assert len(used) > 6
    assert scores.run_tokens == sum(max(sizes) * len(sizes) for sizes in used)
    taken = [number for event, number in scorer.events if event == "read"]
    assert taken[-len(used) :] == [*range(refused + 1, len(scorer.batches) + 1)]
    # What was read before the refusal has been said to be done, and is done again.
    assert len(heard) == len(taken) == len(used) + max(refused - 1 - ahead, 0)


def test_what_never_fits_is_rejected_in_every_row_that_holds_it(score, one_by_one, rows):
    long = [5] * 50
    block = block_of(
        encoded([1, 2], [5], [6], row=0),
        encoded([1, 3], long, [6], row=1),
        encoded([1, 4], [7], [8], row=2),
        encoded([1, 3], [7], long, row=3),
    )
    scores = score(block, Faulty(room=20))
    assert [(bad.row, bad.reason) for bad in scores.rejected] == [(1, "oom"), (3, "oom")]
    for bad, completion in zip(scores.rejected, ("completion 0", "completion 1"), strict=True):
        assert completion in bad.detail
        assert "52 tokens" in bad.detail
    assert scores.block.row.tolist() == [0, 2]
    kept = [one_by_one(block)[completion] for completion in (0, 1, 4, 5)]
    assert scores.block.logps.tolist() == sums_of(kept)
    assert [list(tokens) for tokens in scores.block.token_logps] == [list(t) for t in kept]
    nothing = score(rows, Faulty(room=0))
    assert reasons(nothing) == {"oom": len(rows)}
    assert len(nothing.block) == len(nothing.block.logps) == 0


@pytest.mark.parametrize(("value", "keep"), [(np.nan, True), (np.inf, False), (-np.inf, True)])
def test_a_row_without_a_finite_log_prob_is_rejected_alone(score, value, keep):
    rows = block_of(
        encoded([1, 2], [5], [6], row=0),
        encoded([1, 2], [99, 4], [6, 7], row=1),  # scored in one tree with its neighbours
        encoded([1, 2], [7], [8], row=2),
    )
    scorer = Faulty(poison={99: value})
    scores = score(rows, scorer, keep=keep)
    assert scorer.batches == [[2 + 1 + 1 + 2 + 2 + 1 + 1], [2 + 2]]  # and once more, alone
    (bad,) = scores.rejected
    assert (bad.file, bad.row, bad.reason) == (0, 1, "nonfinite_logp")
    assert "completion 0" in bad.detail
    assert str(value) in bad.detail
    assert scores.block.row.tolist() == [0, 2]
    assert np.isfinite(scores.block.logps).all()
    assert (scores.block.token_logps is not None) == keep


@pytest.mark.parametrize("budget", [20, 100_000])
def test_a_log_prob_that_is_not_finite_spoils_no_neighbour_in_its_batch(
    rows, score, one_by_one, budget
):
    token = int(rows.completions[0][0])
    is_bad = np.array([token in completion for completion in rows.completions])
    bad_rows = np.unique(rows.row_of_completion[is_bad])
    assert 0 < len(bad_rows) < len(rows) / 2
    scores = score(rows, Faulty(poison={token: np.inf}, spreads=True), budget=budget)
    assert reasons(scores) == {"nonfinite_logp": len(bad_rows)}
    assert scores.block.row.tolist() == np.delete(rows.row, bad_rows).tolist()
    is_kept = ~np.isin(rows.row_of_completion, bad_rows)
    kept = [tokens for tokens, keep in zip(one_by_one(rows), is_kept, strict=True) if keep]
    assert [list(tokens) for tokens in scores.block.token_logps] == list(map(list, kept))
    assert np.abs(scores.block.logps - sums_of(kept)).max() <= 1e-13


def test_one_text_behind_one_prompt_is_scored_once(score, one_by_one):
    rows = block_of(
        encoded([1, 2], [5, 6], [7], row=0),
        encoded([1, 2], [5, 6], [8], [7], row=1),
        encoded([3, 2], [5, 6], [7, 7], [7, 7], row=2),
    )
    scorer = Faulty()
    scores = score(rows, scorer)
    assert sorted(scorer.batches[0]) == [2 + 2 + 1 + 1, 2 + 2 + 2]
    assert (scores.completions, scores.reused) == (8, 3)
    assert [list(values) for values in scores.block.token_logps] == list(
        map(list, one_by_one(rows))
    )
    assert scores.block.logps.tolist() == sums_of(one_by_one(rows))


def test_a_row_is_counted_once_when_it_is_too_big_and_not_finite(score):
    rows = block_of(encoded([1], [5] * 50, [99]), encoded([2], [98, 99], [5]))
    scores = score(rows, Faulty(room=20, poison={98: np.inf, 99: -np.inf}))  # of both signs
    assert reasons(scores) == {"oom": 1, "nonfinite_logp": 1}


def test_what_is_known_is_copied_and_not_scored(rows, score):
    count = len(rows.completions)
    found = np.arange(count) % 3 == 0
    tokens = [
        np.full(length if known else 0, -0.125 * (1 + completion % 4), np.float32)
        for completion, (length, known) in enumerate(
            zip(rows.completions.lengths, found, strict=True)
        )
    ]
    logps = np.where(found, -7.0 - np.arange(count), 0.0)
    known = KnownScores(found, Ragged.of(tokens, np.float32), logps, {})
    scorer = Faulty()
    scores = score(rows, scorer, known=known)
    fresh = score(rows, Faulty())
    expected = np.where(found, logps, fresh.block.logps)
    assert scores.block.logps.tobytes() == expected.tobytes()
    for completion, values in enumerate(scores.block.token_logps):
        source = tokens[completion] if found[completion] else fresh.block.token_logps[completion]
        assert values.tobytes() == source.tobytes()
    assert scores.reused == found.sum()


def test_the_scorer_is_not_opened_when_nothing_is_to_be_scored(rows, score):
    known = KnownScores(
        found=np.ones(len(rows.completions), dtype=np.bool_),
        token_logps=None,
        logps=-np.arange(1.0, len(rows.completions) + 1),
        numerics={},
    )
    scores = score(rows, None, known=known, keep=False)  # None cannot even say whether it pads
    assert (scores.run_tokens, scores.padding, scores.reused) == (0, 0, len(rows.completions))
    assert scores.block.logps.tolist() == known.logps.tolist()
    none = score(rows.take(np.array([], dtype=np.int64)), None)
    assert (len(none.block), len(none.block.logps), none.completions) == (0, 0, 0)


@st.composite
def prompts_and_completions(draw):
    """The wanted completions of each prompt, the row of every completion, and all lengths."""
    groups, row_of, lengths, prompts = [], [], [], []
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(st.integers(1, 40))
        groups.append([])
        for _ in range(draw(st.integers(1, 4))):
            for length, is_wanted in draw(
                st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=5)
            ):
                groups[-1] += [len(lengths)] if is_wanted else []
                row_of.append(len(prompts))
                lengths.append(length)
            prompts.append(prompt)
    groups = [group for group in groups if group]
    return groups, np.array(row_of), np.array(prompts), np.array(lengths, dtype=np.int64)


@settings(max_examples=200)
@given(prompts_and_completions(), st.integers(1, 300), st.sampled_from([1, 16, 4096]))
def test_trees_hold_each_wanted_completion_once_behind_its_own_prompt(case, budget, hidden_size):
    groups, row_of, prompts, lengths = case
    cost = TreeCost(hidden_size, budget)
    trees = plan_trees(
        groups, row_of, prompt_lengths=prompts, completion_lengths=lengths, cost=cost
    )
    held = [completion for tree in trees for completion in tree.branches]
    assert sorted(held) == sorted(completion for group in groups for completion in group)
    group_of = {completion: number for number, group in enumerate(groups) for completion in group}
    rows_of = [{row_of[completion] for completion in group} for group in groups]
    for tree in trees:
        (group,) = {group_of[completion] for completion in tree.branches}
        assert tree.row in rows_of[group]
        assert tree.length == prompts[tree.row] + sum(
            lengths[completion] for completion in tree.branches
        )
        assert tree.length <= budget or len(tree.branches) == 1
        alone = sum(cost(prompts[tree.row] + lengths[completion]) for completion in tree.branches)
        assert cost(tree.length) <= alone * (1 + 1e-12)


def test_a_prompt_is_repeated_only_where_attention_over_the_tree_costs_more():
    def plan(row_of, prompts, completions, hidden_size):
        lengths = {"prompt_lengths": np.array(prompts), "completion_lengths": np.array(completions)}
        cost = TreeCost(hidden_size, 1000)
        trees = plan_trees([range(len(completions))], np.array(row_of), **lengths, cost=cost)
        return [(tree.row, tree.branches, tree.length) for tree in trees]

    shared = plan([0, 0, 2], [50, 50, 50], [5, 6, 7], 4096)
    assert shared == [(0, (0, 1, 2), 68)]  # of all rows of the prompt
    # Width 1: 1 + L/6 a token. Together 81 * 14.5 = 1174.5; apart 2 * 41 * 7.83 = 642.
    assert plan([0, 0], [1], [40, 40], 1) == [(0, (0,), 41), (0, (1,), 41)]


def size(batch, lengths, *, pads):
    return max(lengths[i] for i in batch) * len(batch) if pads else sum(lengths[i] for i in batch)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200), st.booleans())
def test_batches_hold_each_sequence_once_within_the_budget(lengths, budget, pads):
    batches = plan_batches(lengths, budget, pads=pads)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    longest_first = [lengths[index] for batch in batches for index in batch]
    assert longest_first == sorted(lengths, reverse=True)
    for batch in batches:
        assert size(batch, lengths, pads=pads) <= budget or len(batch) == 1
    for batch, following in pairwise(batches):  # nothing was left over that would have fitted
        assert size([*batch, following[0]], lengths, pads=pads) > budget
