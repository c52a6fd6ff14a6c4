"""Two ranks: the first is slow for a while, both are stopped, and at last the second falls silent.

It stops as a machine does that has lost its power: its connections stay open.
"""

import json
import os
import signal
import sys
import time
from functools import partial

from align.stages.engine import distributed
from align.stages.engine.distributed import gathered, run_on_rank_zero
from support.forked_ranks import end_of, forked

LOST = 2.0  # seconds of silence
LONG = 1.5 * LOST


def heard(folder):
    """Writes down how far they came, what they said, and how the first one ended."""
    distributed.BEAT_SECONDS, distributed.LOST_SECONDS = 0.1, LOST
    said = folder / "said"
    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)  # where a rank says its end
    first, second = ranks = forked(2, history)
    try:
        for rank in ranks:
            os.waitpid(rank, os.WUNTRACED)
        time.sleep(LONG)
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        code = end_of(first)
    finally:
        os.kill(second, signal.SIGKILL)
    seen = {"said": said.read_text().splitlines(), "code": code}
    (folder / "rank-0.json").write_text(json.dumps(seen))


def history(world):
    run_on_rank_zero(world, partial(time.sleep, LONG))
    say("slow ranks are waited for")
    stop()
    time.sleep(1)  # of which they would lose each other in the first moments
    gathered(world, world.rank)
    say("stopped ranks go on")
    if world.rank == 1:
        stop()
    gathered(world, world.rank)
    say("the silence was not heard")


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def say(what):
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()
