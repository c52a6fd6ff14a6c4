"""Throughput of training, its waits for data, its memory, and the load of the machine."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from ...schemas.methods import Mean

if TYPE_CHECKING:
    from .step import Means


class Meter:
    """The times of steps; the time between two laps belongs to the later one."""

    def __init__(self, *, pads: bool) -> None:
        self.pads = pads  # whether a micro-batch is padded to its longest row
        self._tokens = self._padded = 0
        self._waited = 0.0
        self._started = time.monotonic()

    def restart(self) -> None:
        """Drops the time since the last lap."""
        self._started, self._waited = time.monotonic(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the block as waiting for data."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - started

    def runs(self, *, tokens: int, padded: int) -> None:
        """Sets the tokens of the next step over all ranks."""
        self._tokens, self._padded = tokens, padded

    def lap(self, *, rows: int) -> Means:
        """The means of the step that has ended: tokens, speeds, waiting and padding."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        speeds: Means = {
            "tokens": Mean(float(self._tokens), 1.0),
            "speed/tokens_per_second": Mean(float(self._tokens), seconds),
            "speed/rows_per_second": Mean(float(rows), seconds),
            "speed/step_seconds": Mean(seconds, 1.0),
            "speed/data_wait_seconds": Mean(self._waited, 1.0),
            "padding": Mean(float(self._padded - self._tokens), float(max(1, self._padded))),
        }
        self.restart()
        return speeds


STATUS = Path("/proc/self/status")


def forget_peak() -> None:
    """Resets the peak memory counters, if the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Peak memory: of tensors on a GPU, of the process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    with suppress(OSError):
        for line in STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    # Only a fallback: a forked process begins with its parent's peak.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


MEGA = 1e6


def system_metrics(folder: Path) -> dict[str, float]:
    """The load of this machine and of this rank's GPU; empty if the system does not provide it.

    CPU utilization is measured since the last call.
    """
    try:
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(folder))
        seen = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MEGA,
            "system_memory_usage_percentage": memory.percent,
            "process_memory_usage_megabytes": psutil.Process().memory_info().rss / MEGA,
            "disk_usage_percentage": disk.percent,
            "disk_available_megabytes": disk.free / MEGA,
        }
    except (OSError, psutil.Error):
        return {}
    # A query of another rank's GPU would allocate memory there.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(index)
        seen[f"gpu_{index}_memory_usage_megabytes"] = (total - free) / MEGA
        seen[f"gpu_{index}_memory_usage_percentage"] = 100 * (total - free) / total
    return {f"system/{name}": float(value) for name, value in seen.items()}
