"""Work that other processes do, and at which they fail, die or take long."""

import os
import signal
import time
from dataclasses import dataclass

from align.schemas.errors import UsageError


@dataclass(frozen=True)
class Squares:
    """The square of each item, but for one at which the process dies, or is refused."""

    kills: int = -1
    fails: int = -1

    def __call__(self, item):
        if item == self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if item == self.fails:
            raise UsageError(f"item {item}")
        return item * item


def slow(_):
    """Long enough in a shard to be killed there."""
    time.sleep(0.5)


def refused(_):
    """What a model may say of a batch."""
    raise UsageError("This reference was told to refuse.")
