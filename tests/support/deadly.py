"""Work that other processes do, and at which they fail, die or wait."""

import os
import signal
from dataclasses import dataclass

from align.schemas.errors import UsageError
from support.patience import wait_until


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


class Held:
    """Lets the first batch of each process pass, and all others once a file is there."""

    def __init__(self, file):
        self._file, self._is_first = file, True

    def __call__(self, _):
        if not self._is_first:
            wait_until(self._file.exists)
        self._is_first = False


def refused(_):
    """What a model may say of a batch."""
    raise UsageError("This reference was told to refuse.")
