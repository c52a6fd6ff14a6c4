"""Forks the ranks of a world from a process that has imported for all of them."""

import os
import socket
import sys
from contextlib import closing

from align.stages.engine.distributed import joined_world


def forked(size, action):
    """Starts ranks that meet, and then run the action; returns their process ids."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    children = []
    for rank in range(size):
        if child := os.fork():
            children.append(child)
            continue
        who = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}
        os.environ.update(place | {name: str(number) for name, number in who.items()})
        try:
            with joined_world() as world:
                action(world)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return children


def end_of(child):
    """How a rank ended, once it has."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
