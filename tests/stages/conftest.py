import gc

import pytest


@pytest.fixture
def one_rank():
    """This process, as a world of one rank."""
    # It imports torch, which most of these tests do without.
    from align.stages.engine.distributed import joined_world  # noqa: PLC0415

    gc.freeze()  # DeepSpeed collects garbage several times as it opens an engine
    with joined_world() as world:
        yield world
    gc.unfreeze()
