"""Two ranks of which the first takes longer than collectives may."""

import sys
import time
from datetime import timedelta

from torch.distributed import distributed_c10d

from align.stages.engine.distributed import (
    gathered,
    joined_world,
    run_on_all_ranks,
    run_on_rank_zero,
)


def slow(world):
    if world.rank == 0:
        time.sleep(5)
    return world.rank


with joined_world() as here:
    distributed_c10d._set_pg_timeout(timedelta(seconds=3))  # once they have met: that may take long
    assert run_on_rank_zero(here, lambda: slow(here)) == 0
    assert run_on_all_ranks(here, lambda: slow(here)) == here.rank
    assert gathered(here, here.rank) == [0, 1]
sys.stdout.write("met\n")
