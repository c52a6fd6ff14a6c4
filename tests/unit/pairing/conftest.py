import pytest


@pytest.fixture
def new_folder(tmp_path_factory):
    """A new one for every example."""
    return lambda: tmp_path_factory.mktemp("example")
