"""The simulation of many ranks, scaled down."""

import pytest

from bench.plan_scale import made_up_table, simulate


@pytest.fixture(scope="module")
def table():
    return made_up_table(300_000)


@pytest.mark.parametrize("pads", [False, True])
def test_load_is_even_over_many_ranks(table, pads):
    figures = simulate(table, 256, 32, pads=pads, sampled=4)
    assert figures.worst_load < 1.05
    assert figures.mismatched_load < 1.05
    assert figures.turn_load < 1.1


def test_a_row_takes_a_few_dozen_bytes_of_plan(table):
    assert table.nbytes < 33 * len(table)
