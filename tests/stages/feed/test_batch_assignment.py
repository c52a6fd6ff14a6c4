"""The assignment of sequences to ranks: what must hold of every one, and some worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.stages.feed.step_plan import assign_batches

LENGTHS = st.lists(st.integers(1, 120), max_size=50)
WORLDS = st.sampled_from([1, 2, 3, 4, 8])


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
@given(LENGTHS, WORLDS, st.integers(1, 300), st.booleans())
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


@pytest.mark.parametrize("pads", [False, True])
def test_many_sequences_are_dealt_evenly(pads):
    lengths = np.random.default_rng(0).integers(50, 500, 64 * 8).tolist()
    ranks = dealt(lengths, world=8, budget=4096, pads=pads)
    loads = [sum(load(batch, lengths, pads=pads) for batch in batches) for batches in ranks]
    assert max(loads) <= 1.02 * np.mean(loads)


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
