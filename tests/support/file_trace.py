"""Which files of align a command enters, and which of them on one stretch of its way.

A file is entered when one of its functions runs; what only runs as a module is imported does not
count, and neither do functions that dataclasses write, which stand in no file.
"""

import fnmatch
import json
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

IMPORTING = "<frozen importlib._bootstrap>"
CO_OPTIMIZED = 0x1  # the code of a function, and not of a module or of a class


@contextmanager
def traced(*, out, begins, ends, way=()):
    """Writes to `out` the files that are entered, in the order in which they first are.

    The stretch begins as a file that matches `begins` is first opened, with what is being run then,
    and is over once something stands in a file that matches `ends`. Of the files of `way` those are
    written that are entered one after the other on that stretch.
    """
    trace = _Trace(begins, ends, way)
    sys.addaudithook(trace.hear)  # nothing takes it away: a process is traced once
    threading.setprofile(trace.see)
    sys.setprofile(trace.see)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        found = {"command": trace.whole, "row": trace.stretch, "way": way[: trace.way_done]}
        Path(out).write_text(json.dumps({name: list(files) for name, files in found.items()}))


class _Trace:
    def __init__(self, begins, ends, way):
        from align import cli  # noqa: PLC0415 - only the process that is traced imports it

        self.root = f"{Path(cli.__file__).parent}{os.sep}"
        self.begins, self.ends = begins, Path(ends)
        self.way, self.way_done = [*way, None], 0
        self.whole, self.stretch = {}, {}  # sets that keep their order
        self.is_on = self.is_over = False

    def hear(self, event, arguments):
        """An audit event: the stretch begins where the first of its files is opened."""
        if event == "open" and not self.is_on and fnmatch.fnmatch(str(arguments[0]), self.begins):
            self.is_on = True
            for frame in reversed(list(_callers(sys._getframe()))):
                self.see(frame, "call", None)

    def see(self, frame, event, _):
        """An event of the profiler: a function is called, or a generator goes on."""
        name = frame.f_code.co_filename.removeprefix(self.root)
        is_known = name in (self.stretch if self.is_on and not self.is_over else self.whole)
        if event != "call" or (is_known and name != self.way[self.way_done]):
            return
        if not _counts(frame, name):
            return
        self.whole.setdefault(name)
        self.is_over = self.is_over or (self.is_on and _holds_something(self.ends))
        if self.is_on and not self.is_over:
            self.stretch.setdefault(name)
            self.way_done += name == self.way[self.way_done]


def _counts(frame, name):
    """Whether it is a function of the package, and no import is what runs it."""
    is_ours = not name.startswith(("/", "<", "tests/", "."))
    if not is_ours or not frame.f_code.co_flags & CO_OPTIMIZED:
        return False
    return not any(caller.f_code.co_filename == IMPORTING for caller in _callers(frame))


def _callers(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back


def _holds_something(pattern):
    found = pattern.parent.glob(pattern.name) if pattern.parent.is_dir() else ()
    return any(path.stat().st_size for path in found)
