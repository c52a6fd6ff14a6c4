"""Where a host waits for its device, counted by the line that asked."""

import os
import sys
from collections import Counter
from pathlib import Path

from support.rooms import ROOMS, ROOT

_HOUSES = tuple(f"{ROOT / room}/" for room in ROOMS)


def place_of(name):
    """`stages/…` for a file of align, `LIBRARY/…` for a library, empty for torch and tests."""
    name = os.path.realpath(name)
    if name.startswith(_HOUSES):
        return str(Path(name).relative_to(ROOT))
    library = name.rpartition("/site-packages/")[2]
    return "" if library == name or library.startswith("torch/") else library


class Waits:
    """Where the host waited for the device: the line that asked, of align or of a library."""

    def __init__(self):
        self.seen = Counter()

    def add(self, what):
        """Notes a wait under the innermost line that is neither torch's nor a test's."""
        frame = sys._getframe(1)
        while frame is not None and not (place := place_of(frame.f_code.co_filename)):
            frame = frame.f_back
        where = f"{place}:{frame.f_lineno}" if frame is not None else "a backward pass of torch"
        self.seen[f"{where} {what}"] += 1

    def taken(self):
        """Returns the waits so far and forgets them."""
        seen, self.seen = dict(self.seen), Counter()
        return seen
