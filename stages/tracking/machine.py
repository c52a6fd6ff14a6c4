"""What the machine is doing, by the names under which MLflow shows it in a tab of its own."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
