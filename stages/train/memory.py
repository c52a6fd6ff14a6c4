"""The most memory this process has held."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def forget_peak() -> None:
    """From now on the most memory is that of what follows; where the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """On a GPU its tensors; else what the system counts for the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    with suppress(OSError):
        for line in STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    # The second choice: a process that was forked begins with its parent's.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
