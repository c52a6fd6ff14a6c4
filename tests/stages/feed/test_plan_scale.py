"""The simulation of many ranks, scaled down."""

import pytest

from bench.plan_scale import made_up_table, simulate, table_by_range


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


def test_a_step_of_a_billion_rows_asks_for_no_lengths_but_its_own():
    """So a table that is mapped from files would be read range by range."""
    table = table_by_range(1_000_000_000)
    figures = simulate(table, 256, 4, pads=False, sampled=2)
    assert figures.worst_load < 1.2
    # Two steps of 1,024 rows: each asks once to plan rows and trees, and here once more for loads.
    assert 2 * 1024 <= table.prompt_tokens.asked <= 8 * 2 * 1024
    assert table.nbytes == 8 * (1_000_000_000 // 512 + 1)
