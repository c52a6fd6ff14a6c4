"""Forks the ranks of a world from one process that has imported for all of them."""

import os
import socket
import sys
from contextlib import closing

from align.stages.engine.distributed import joined_world

COMPUTE_ON = "ALIGN_TEST_RANKS_ON"


def device_of_ranks():
    """The device of the ranks of a test world; each has a GPU of its own if it is not a CPU."""
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
    """Waits for processes; none may fail."""
    ended = [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in children]
    assert not any(ended), ended
