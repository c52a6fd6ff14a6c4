import gc

import pytest


@pytest.fixture(scope="session")
def deepspeed():
    """It collects garbage several times as it opens an engine, and is none itself."""
    # It imports torch, which most of these tests do without.
    from align.stages.engine.deepspeed_compat import deepspeed  # noqa: PLC0415

    gc.collect()
    gc.freeze()
    return deepspeed


@pytest.fixture
def one_rank(deepspeed):
    """This process, as a world of one rank."""
    from align.stages.engine.distributed import joined_world  # noqa: PLC0415

    with joined_world() as world:
        yield world


@pytest.fixture
def new_folder(tmp_path_factory):
    """A new one for every example."""
    return lambda: tmp_path_factory.mktemp("example")
