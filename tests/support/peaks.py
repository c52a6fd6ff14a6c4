"""The memory that a process needs to read a file, and what it read."""

import gc
from pathlib import Path

from support.read_files import read_by_chunk


def counted_rows(path):
    """The numbers of rows that are used and that are not, of which none is kept."""
    used = refused = 0
    for good, bad in read_by_chunk(path):
        used, refused = used + len(good), refused + len(bad)
    return used, refused


def read_measured(path, report):
    """Reports the rows of a file, and how many MiB more than before were held at the peak."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = mib("VmRSS")
    used, refused = counted_rows(path)
    report.put((used, refused, mib("VmHWM") - before))


def mib(what):
    """What the kernel says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024
