"""Plans of steps, against an epoch laid out row by row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.stages.feed.step_plan import evaluation_pass, training_pass
from support.shard_cache import settings_of, table_of

WORLDS = (1, 2, 3, 4, 8)
SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=40).filter(any)


def epoch_of(table, epoch=0, **changed):
    one_pass = training_pass(table, settings_of(**changed), epoch=epoch)
    return list(one_pass.plans(0, one_pass.num_steps))


def content(plans):
    """What a step is, whoever runs it."""
    return [
        (plan.cursor, plan.rows.tolist(), [column.tolist() for column in vars(plan.pairs).values()])
        for plan in plans
    ]


@settings(max_examples=100)
@given(SIZES, st.integers(1, 20), st.integers(0, 3), st.integers(0, 9))
def test_every_row_is_in_one_step_of_an_epoch(sizes, batch_size, epoch, seed):
    plans = epoch_of(table_of(sizes), batch_size=batch_size, epoch=epoch, seed=seed)
    rows = [row for plan in plans for row in plan.rows.tolist()]
    assert sorted(rows) == list(range(sum(sizes)))
    assert all(len(plan.rows) == batch_size for plan in plans[:-1])


@settings(max_examples=60)
@given(
    SIZES,
    st.integers(1, 20),
    st.integers(1, 300),
    st.sampled_from(WORLDS),
    st.booleans(),
    st.integers(0, 9),
)
def test_steps_are_the_same_for_any_world_and_budget(sizes, batch, budget, world, pads, most):
    table = table_of(sizes, levels=2)
    same = {"batch_size": batch, "kl_per_step": most}
    plans = epoch_of(table, world=world, tokens_per_batch=budget, pads=pads, **same)
    assert content(plans) == content(epoch_of(table, **same))
    for plan in plans:
        run = [
            row for rank in range(world) for one in plan.own.of_rank(rank) for row in one.tolist()
        ]
        assert sorted(run) == list(range(len(plan.rows)))
        read = [row for rank in range(world) for row in plan.rows_of_rank(rank).tolist()]
        assert set(read) == set(plan.rows.tolist())


def test_a_step_can_be_planned_alone():
    table = table_of([7] * 30, levels=1)
    one_pass = training_pass(table, settings_of(batch_size=13), epoch=2)
    plans = list(one_pass.plans(0, one_pass.num_steps))
    for step in range(one_pass.num_steps):
        assert content(one_pass.plans(step, step + 1)) == content(plans[step : step + 1])


def pairs_of(plan):
    pairs = plan.pairs
    return list(
        zip(pairs.rows.tolist(), pairs.levels.tolist(), pairs.branches.tolist(), strict=True)
    )


@pytest.mark.parametrize("epoch", range(4))
def test_each_completion_meets_one_partner_an_epoch_in_turn(epoch):
    table = table_of([9, 9], levels=3)
    for plan in epoch_of(table, epoch=epoch):
        counts = table.num_branches(plan.rows).tolist()
        expected = [
            (place, epoch % 3, branch)
            for place, count in enumerate(counts)
            for branch in range(count)
        ]
        assert pairs_of(plan) == expected


def test_each_completion_can_meet_all_partners_every_epoch():
    table = table_of([9, 9], levels=3)
    for plan in epoch_of(table, kl_use="all"):
        counts = table.num_branches(plan.rows).tolist()
        expected = [
            (place, level, branch)
            for place, count in enumerate(counts)
            for level in range(3)
            for branch in range(count)
        ]
        assert pairs_of(plan) == expected


def test_too_many_pairs_are_drawn_from_anew_in_each_step():
    table = table_of([100] * 10, levels=1, most_branches=1)
    plans = epoch_of(table, batch_size=10, kl_per_step=4)
    assert all(len(plan.pairs) == 4 for plan in plans)
    assert all(pairs_of(plan) == sorted(pairs_of(plan)) for plan in plans)
    drawn = np.bincount(np.concatenate([plan.pairs.rows for plan in plans]), minlength=10)
    assert ((drawn - 40) ** 2 / 24).sum() < 35  # each of ten places is drawn 40 times of 100


def test_a_tree_of_mismatched_branches_costs_its_prompt_and_these_branches():
    table = table_of([5], levels=2, seed=3)
    budget = 80
    for plan in epoch_of(table, batch_size=5, kl_use="all", tokens_per_batch=budget):
        lengths = [
            int(table.prompt_tokens[row])
            + sum(
                int(table.mismatched_tokens[table.branch_offsets[row] + branch, level])
                for place, level, branch in pairs_of(plan)
                if plan.rows[place] == row
            )
            for row in plan.rows[plan.paired_rows].tolist()
        ]
        for batch in plan.mismatched.of_rank(0):
            assert sum(lengths[tree] for tree in batch) <= budget or len(batch) == 1


def test_without_mismatched_branches_there_is_no_pass_over_them():
    for plan in epoch_of(table_of([9, 9]), world=2):
        assert plan.mismatched.num_turns == 0


def test_a_limit_cuts_an_epoch_short():
    table = table_of([10] * 4)
    assert content(epoch_of(table, limit_train_batches=3)) == content(epoch_of(table))[:3]
    assert len(epoch_of(table, limit_train_batches=99)) == 5


def test_evaluation_has_one_order_and_one_partner_each_time():
    table = table_of([10, 0, 13], levels=3)
    plans = evaluation_pass(table, settings_of(limit_eval_batches=2)).plans(0, 2)
    for start, plan in zip((0, 8), plans, strict=True):
        assert plan.rows.tolist() == list(range(start, start + 8))
        assert set(plan.pairs.levels.tolist()) == {0}
