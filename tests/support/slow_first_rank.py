"""Two ranks of which the first takes longer than collectives may."""

import sys
import time
from datetime import timedelta

from align.stages.engine import distributed
from align.stages.engine.distributed import gathered, run_on_all_ranks, run_on_rank_zero

distributed.TIMEOUT = timedelta(seconds=2)


def slow(world):
    if world.rank == 0:
        time.sleep(4)
    return world.rank


with distributed.joined_world() as here:
    assert run_on_rank_zero(here, lambda: slow(here)) == 0
    assert run_on_all_ranks(here, lambda: slow(here)) == here.rank
    assert gathered(here, here.rank) == [0, 1]
sys.stdout.write("met\n")
