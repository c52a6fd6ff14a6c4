"""Work that other processes do, and at which they fail or die."""

import os
import signal
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
