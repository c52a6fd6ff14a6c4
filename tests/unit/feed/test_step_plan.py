"""Plans of steps, and how their sequences are dealt to ranks, against what is laid out in full."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.stages.feed.step_plan import (
    assign_batches,
    evaluation_pass,
    rows_seen,
    steps_in,
    training_pass,
)
from support.shard_cache import settings_of, table_of

WORLDS = (1, 2, 3, 4, 8)
SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=40).filter(any)


def epoch_of(table, epoch=0, **changed):
    one_pass = training_pass(table, settings_of(**changed), epoch=epoch)
    return list(one_pass.plans(0, one_pass.num_steps))


def content(plans):
    """What a step is, whoever runs it."""
    return [
        (plan.step, plan.rows.tolist(), [column.tolist() for column in vars(plan.pairs).values()])
        for plan in plans
    ]


@settings(max_examples=100)
@given(
    SIZES,
    st.integers(1, 20),
    st.integers(1, 300),
    st.sampled_from(WORLDS),
    st.booleans(),
    st.integers(0, 9),
)
def test_every_row_is_in_one_step_whatever_the_world_and_the_budget(
    sizes, batch, budget, world, pads, most
):
    table = table_of(sizes, levels=2)
    same = {"batch_size": batch, "kl_per_step": most, "epoch": most % 3, "seed": most % 2}
    plans = epoch_of(table, world=world, tokens_per_batch=budget, pads=pads, **same)
    assert sorted(row for plan in plans for row in plan.rows.tolist()) == list(range(sum(sizes)))
    assert all(len(plan.rows) == batch for plan in plans[:-1])
    assert content(plans) == content(epoch_of(table, **same))
    for plan in plans:
        run = [
            row for rank in range(world) for one in plan.own.of_rank(rank) for row in one.tolist()
        ]
        assert sorted(run) == list(range(len(plan.rows)))
        read = [row for rank in range(world) for row in plan.rows_of_rank(rank).tolist()]
        assert set(read) == set(plan.rows.tolist())


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "steps"),
    [
        (1.0, 4, 4),
        (3, 4, 12),
        (0.5, 4, 2),
        (0.5, 3, 2),  # the part of an epoch ends with a whole step
        (1.25, 4, 5),
        (1e-9, 4, 1),
        (0.1, 30, 3),  # in binary, a tenth of 30 is a little more than 3
        (0.3, 10, 3),
        (1.1, 10, 11),
        (100_000.0, 7, 700_000),
    ],
)
def test_steps_of_a_part_of_an_epoch(epochs, per_epoch, steps):
    assert steps_in(epochs, per_epoch) == steps


def test_rows_that_were_seen():
    """Ten rows, four a step: an epoch is 4 + 4 + 2 rows."""
    assert [rows_seen(steps, 10, 4) for steps in range(6)] == [0, 4, 8, 10, 14, 18]


def pairs_of(plan):
    pairs = plan.pairs
    return list(
        zip(pairs.rows.tolist(), pairs.partners.tolist(), pairs.completions.tolist(), strict=True)
    )


def test_each_completion_meets_its_partners_in_turn():
    table = table_of([9, 9], levels=3)
    ways = [({"epoch": epoch}, [epoch % 3]) for epoch in range(4)]
    for changed, levels in [*ways, ({"kl_use": "all"}, [0, 1, 2])]:
        for plan in epoch_of(table, **changed):
            counts = table.num_completions(plan.rows).tolist()
            assert pairs_of(plan) == [
                (place, level, completion)
                for place, count in enumerate(counts)
                for level in levels
                for completion in range(count)
            ]


def test_too_many_pairs_are_drawn_from_anew_in_each_step():
    table = table_of([100] * 10, levels=1, most_completions=1)
    plans = epoch_of(table, batch_size=10, kl_per_step=4)
    assert all(len(plan.pairs) == 4 for plan in plans)
    assert all(pairs_of(plan) == sorted(pairs_of(plan)) for plan in plans)
    drawn = np.bincount(np.concatenate([plan.pairs.rows for plan in plans]), minlength=10)
    assert ((drawn - 40) ** 2 / 24).sum() < 35  # each of ten places is drawn 40 times of 100


def test_evaluation_has_one_order_and_one_partner_each_time():
    table = table_of([10, 0, 13], levels=3)
    plans = evaluation_pass(table, settings_of(limit_eval_batches=2)).plans(0, 2)
    for start, plan in zip((0, 8), plans, strict=True):
        assert plan.rows.tolist() == list(range(start, start + 8))
        assert set(plan.pairs.partners.tolist()) == {0}


LENGTHS = st.lists(st.integers(1, 120), max_size=50)


def dealt(lengths, *, world, budget, pads=False):
    """Each rank's micro-batches as lists."""
    whole = assign_batches(
        np.array(lengths, dtype=np.int64), world_size=world, budget=budget, pads=pads
    )
    return [[batch.tolist() for batch in whole.of_rank(rank)] for rank in range(world)]


def load(batch, lengths, *, pads):
    sizes = [lengths[index] for index in batch]
    return max(sizes, default=0) * len(sizes) if pads else sum(sizes)


@settings(max_examples=500)
@given(LENGTHS, st.sampled_from(WORLDS), st.integers(1, 300), st.booleans())
def test_every_sequence_runs_once_within_the_budget_and_ranks_keep_step(
    lengths, world, budget, pads
):
    ranks = dealt(lengths, world=world, budget=budget, pads=pads)
    run = [index for batches in ranks for batch in batches for index in batch]
    assert sorted(run) == list(range(len(lengths)))
    assert len({len(batches) for batches in ranks}) == 1
    for batches in ranks:
        for batch in batches:
            assert load(batch, lengths, pads=pads) <= budget or len(batch) == 1
            assert batch == sorted(batch)
        filled = [bool(batch) for batch in batches]
        assert filled == sorted(filled, reverse=True)  # the empty ones come last
    if lengths:
        assert any(batches[-1] for batches in ranks)  # no turn that nobody needs
        if not pads:
            loads = [
                sum(lengths[index] for batch in batches for index in batch) for batches in ranks
            ]
            assert max(loads) <= sum(loads) / world + max(lengths)


def test_assignments_worked_by_hand():
    # 60 + 40 | 50 + 50: two full micro-batches of 100.
    assert dealt([40, 50, 60, 50], world=1, budget=100) == [[[0, 2], [1, 3]]]
    # What is longer than the budget runs alone.
    assert dealt([10, 500, 10], world=1, budget=100) == [[[1], [0, 2]]]
    # 3 * 10 and 2 * 40; any other pairing of long and short pads to 40 and costs more turns.
    assert dealt([10, 40, 10, 40, 10], world=1, budget=80, pads=True) == [[[1, 3], [0, 2, 4]]]
    # A rank without sequences runs empty micro-batches.
    assert dealt([70, 70, 70], world=2, budget=100) == [[[0], [2]], [[1], []]]
    assert dealt([], world=2, budget=100) == [[], []]
    # 90 + 50 against 70 + 60; by turns alone it would be 150 against 120.
    assert dealt([90, 70, 60, 50], world=2, budget=100) == [[[0], [3]], [[1], [2]]]


def test_thousands_of_sequences_that_pair_badly_are_dealt_quickly():
    # Of 0.4 of the budget each only two fit: a count of turns by sums alone is a fifth too low.
    ranks = dealt([40] * 10_000, world=1, budget=100)
    assert 5000 <= len(ranks[0]) <= 5500
