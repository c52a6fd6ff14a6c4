"""Forks processes, such as the ranks of a world, from one that has imported for all of them."""

import os
import socket
import sys
from contextlib import closing

from align.stages.engine.distributed import joined_world

COMPUTE_ON = "ALIGN_TEST_RANKS_ON"


def device_of_ranks():
    """What ranks of a test world compute on; on GPUs each has its own, and they meet over NCCL."""
    return os.environ.get(COMPUTE_ON, "cpu")


def child(action, *given):
    """Starts a process that runs the action; returns its id."""
    if pid := os.fork():
        return pid
    try:
        action(*given)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def forked(size, action):
    """Starts ranks that meet, and then run the action; returns their process ids."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    who = [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size} for rank in range(size)]
    return [child(join, action, place | one) for one in who]


def join(action, environment):
    os.environ.update({name: str(value) for name, value in environment.items()})
    with joined_world() as world:
        action(world)


def require_good_ends(children):
    """Waits for processes, of which none may fail."""
    ended = [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in children]
    assert not any(ended), ended
