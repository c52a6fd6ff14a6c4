from functools import cache

import pytest

from support.programs import run_ranks


@pytest.fixture(scope="session")
def launched(tmp_path_factory, world):
    """Launches the ranks of a world; gives what each of them saw."""

    @cache
    def launch(size, *names):
        folder = tmp_path_factory.mktemp(f"world-{size}")
        return run_ranks("engine_ranks", folder, world.model, *names, ranks=size)

    return launch
