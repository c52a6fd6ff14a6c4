"""Load of the machine and of this rank's GPU, under MLflow's names."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

MEGA = 1e6


def system_metrics(folder: Path) -> dict[str, float]:
    """The load of this machine and of this rank's GPU; empty if the system does not report it.

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
