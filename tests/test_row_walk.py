"""docs/architecture.md lists the files that a row really enters, and all that there are."""

import pytest

from support.rooms import ROOMS, STAGES
from support.row_walk import (
    ALL_FILES,
    OWN_WAY,
    THE_ROOMS,
    described,
    lists,
    room_blocks,
    rooms,
    section,
    walks,
)


@pytest.fixture(scope="module")
def listed():
    """Of both stages the row's own way, and every file."""
    return lists(OWN_WAY), lists(ALL_FILES)


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


def test_every_room_is_described_file_by_file():
    assert {folder.rpartition("/")[2] for folder in rooms()} == {*ROOMS} - {"stages"} | {*STAGES}
    for one in room_blocks():
        assert one in section(THE_ROOMS)


def test_the_files_of_the_own_way_are_described():
    for files in lists(OWN_WAY):
        assert described(files) in section(OWN_WAY)
