"""Planning, against plans made one branch and one sequence at a time."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from align.stages.score.batch_plan import TreeCost, plan_batches, plan_trees


@st.composite
def prompts_and_branches(draw):
    """Rows by prompt, the branches each row wants scored, and all lengths."""
    groups, wanted, lengths, prompts = [], [], [], []
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(st.integers(1, 40))
        rows = draw(st.integers(1, 4))
        groups.append(list(range(len(prompts), len(prompts) + rows)))
        for _ in range(rows):
            prompts.append(prompt)
            own = draw(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=5))
            wanted.append([len(lengths) + i for i, (_, is_wanted) in enumerate(own) if is_wanted])
            lengths += [length for length, _ in own]
    return groups, wanted, np.array(prompts), np.array(lengths, dtype=np.int64)


@settings(max_examples=200)
@given(prompts_and_branches(), st.integers(1, 300), st.sampled_from([1, 16, 4096]))
def test_trees_hold_each_wanted_branch_once_behind_its_own_prompt(case, budget, hidden_size):
    groups, wanted, prompts, lengths = case
    cost = TreeCost(hidden_size, budget)
    trees = plan_trees(groups, wanted, prompt_lengths=prompts, branch_lengths=lengths, cost=cost)
    held = [branch for tree in trees for branch in tree.branches]
    assert sorted(held) == sorted(branch for row in wanted for branch in row)
    row_of = {branch: row for row, branches in enumerate(wanted) for branch in branches}
    group_of = {row: number for number, group in enumerate(groups) for row in group}
    for tree in trees:
        assert {group_of[row_of[branch]] for branch in tree.branches} == {group_of[tree.row]}
        assert tree.length == prompts[tree.row] + sum(lengths[branch] for branch in tree.branches)
        assert tree.length <= budget or len(tree.branches) == 1
        alone = sum(cost(prompts[tree.row] + lengths[branch]) for branch in tree.branches)
        assert cost(tree.length) <= alone * (1 + 1e-12)


def test_a_prompt_is_repeated_only_where_attention_over_the_tree_costs_more():
    def plan(groups, wanted, prompts, branches, hidden_size):
        lengths = {"prompt_lengths": np.array(prompts), "branch_lengths": np.array(branches)}
        trees = plan_trees(groups, wanted, **lengths, cost=TreeCost(hidden_size, 1000))
        return [(tree.row, tree.branches, tree.length) for tree in trees]

    shared = plan([[0, 1, 2]], [[0, 1], [], [2]], [50, 50, 50], [5, 6, 7], 4096)
    assert shared == [(0, (0, 1, 2), 68)]  # of all rows of the prompt
    # Width 1: 1 + L/6 a token. Together 81 * 14.5 = 1174.5; apart 2 * 41 * 7.83 = 642.
    assert plan([[0]], [[0, 1]], [1], [40, 40], 1) == [(0, (0,), 41), (0, (1,), 41)]
    assert plan([[0]], [[]], [3], [4], 64) == []


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
