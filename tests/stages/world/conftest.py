from __future__ import annotations

import pytest

from align.stages.world.world import World, make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), rows=300, pretrain_steps=30)
