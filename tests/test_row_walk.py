"""docs/architecture.md tells the way that a row really takes."""

import pytest

from support.row_walk import lists, walks


@pytest.fixture(scope="module")
def listed():
    """Of both stages the row's own way, and every file."""
    way_1, all_1, way_2, all_2 = lists()
    return (way_1, way_2), (all_1, all_2)


@pytest.fixture(scope="module")
def traced(server, world, listed, tmp_path_factory):
    """Both stages over the same rows."""
    folder = tmp_path_factory.mktemp("walk")
    return walks(server, folder, data=world.data.unpaired, model=world.model, ways=listed[0])


@pytest.mark.parametrize("stage", [0, 1], ids=["precompute-ref", "train"])
def test_the_document_lists_exactly_the_files_that_a_row_enters(stage, traced, listed):
    assert sorted(traced[stage].row) == sorted(listed[1][stage])


@pytest.mark.parametrize("stage", [0, 1], ids=["precompute-ref", "train"])
def test_a_row_enters_the_files_of_its_own_way_one_after_the_other(stage, traced, listed):
    assert traced[stage].way == listed[0][stage]


@pytest.mark.parametrize("stage", [0, 1], ids=["precompute-ref", "train"])
def test_a_command_enters_more_files_than_its_row(stage, traced):
    assert {*traced[stage].row} < {*traced[stage].command}
