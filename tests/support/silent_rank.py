"""Two ranks: the first is slow for a while, as in a long save; at last the second falls silent.

It stops as a machine does that has lost its power: its connections stay open.
"""

import hashlib
import os
import signal
import sys
import time

from align.stages.engine import distributed
from align.stages.engine.distributed import gathered, run_on_rank_zero

distributed.BEAT_SECONDS, distributed.LOST_SECONDS = 0.1, 2.0


def slow():
    """Longer than a lost rank is waited for."""
    deadline = time.monotonic() + 2 * distributed.LOST_SECONDS
    while time.monotonic() < deadline:
        hashlib.sha256(bytes(1 << 22))


with distributed.joined_world() as here:
    run_on_rank_zero(here, slow)
    sys.stdout.write("slow ranks are waited for\n")
    sys.stdout.flush()
    sys.stdin.readline()  # all ranks are stopped meanwhile, and go on together
    gathered(here, here.rank)
    sys.stdout.write("stopped ranks go on\n")
    sys.stdout.flush()
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    gathered(here, here.rank)
    sys.stdout.write("the silence was not heard\n")
