"""How fast training goes, what it waits for, the memory it holds, and what the machine is doing."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from .step import Totals


class Meter:
    """Times steps; everything between two laps belongs to the later one."""

    def __init__(self, *, pads: bool) -> None:
        self.pads = pads  # whether a micro-batch is padded to its longest row
        self._tokens = self._padded = 0
        self._waited = 0.0
        self._started = time.monotonic()

    def restart(self) -> None:
        """What was done since the last lap belongs to no step."""
        self._started, self._waited = time.monotonic(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as waiting for data."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - started

    def runs(self, *, tokens: int, padded: int) -> None:
        """The coming step runs so many tokens over all ranks."""
        self._tokens, self._padded = tokens, padded

    def lap(self, *, rows: int) -> Totals:
        """What the step that is over adds to sums: tokens to tokens, seconds to seconds."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        speeds: Totals = {
            "tokens": (float(self._tokens), 1.0),
            "speed/tokens_per_second": (float(self._tokens), seconds),
            "speed/rows_per_second": (float(rows), seconds),
            "speed/step_seconds": (seconds, 1.0),
            "speed/data_wait_seconds": (self._waited, 1.0),
            "padding": (float(self._padded - self._tokens), float(max(1, self._padded))),
        }
        self.restart()
        return speeds


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


MEGA = 1e6


class Machine:
    """The first rank's machine; shares of the processor are those since the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with suppress(OSError, psutil.Error):
            psutil.cpu_percent()

    def now(self) -> dict[str, float]:
        """One look; nothing where the system does not answer, for nobody trains for its sake."""
        try:
            seen = {**self._seen(), **dict(_device())}
        except (OSError, psutil.Error):
            return {}
        return {f"system/{name}": float(value) for name, value in seen.items()}

    def _seen(self) -> dict[str, float]:
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(self._folder))
        return {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MEGA,
            "system_memory_usage_percentage": memory.percent,
            "process_memory_usage_megabytes": psutil.Process().memory_info().rss / MEGA,
            "disk_usage_percentage": disk.percent,
            "disk_available_megabytes": disk.free / MEGA,
        }


def _device() -> Iterator[tuple[str, float]]:
    """The GPU of this rank. A look at another would take memory there."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(index)
        yield f"gpu_{index}_memory_usage_megabytes", (total - free) / MEGA
        yield f"gpu_{index}_memory_usage_percentage", 100 * (total - free) / total
