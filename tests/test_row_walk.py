"""The instrument that writes the lists of docs/architecture.md, and the one list that is held."""

from support.rooms import ROOMS, STAGES
from support.row_walk import OWN_WAY, THE_ROOMS, lists, rooms, walks


def test_every_file_of_every_room_is_listed_and_no_other():
    assert {folder.rpartition("/")[2] for folder in rooms()} == {*ROOMS} - {"stages"} | {*STAGES}
    for (folder, files), listed in zip(rooms().items(), lists(THE_ROOMS), strict=True):
        assert [f"{folder}/{name}" for name in listed] == files


def test_a_row_enters_its_own_way_and_a_command_enters_more_files_than_its_row(
    server, world, tmp_path
):
    stages = walks(
        *(server, tmp_path), data=world.data.unpaired, model=world.model, ways=lists(OWN_WAY)
    )
    for walk in stages:
        assert walk.way
        assert {*walk.way} <= {*walk.row} < {*walk.command}
