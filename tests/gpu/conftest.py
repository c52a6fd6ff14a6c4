import pytest

from align.stages.engine.distributed import joined_world


@pytest.fixture(scope="module")
def lone_rank(device):
    with joined_world() as world:
        yield world
