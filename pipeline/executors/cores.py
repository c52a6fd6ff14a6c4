"""The cores that this process may use, and how its threads wait for one another."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

# OpenMP's words by which a user says whether threads that wait for others spin or sleep.
HOW_THREADS_WAIT = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
GROUPS = Path("sys/fs/cgroup")
OWN = Path("proc/self/cgroup")


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that the system and the quota of its group allow; at least one."""
    quotas = [math.ceil(quota) for quota in _quotas(root)]
    return max(1, min([_allowed_cores(), *quotas]))


def _allowed_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """In cores, of the group of this process and of every group around it."""
    for line in _read(root / OWN).splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            for folder in _around(root / GROUPS, group):
                yield from _quota(*_read(folder / "cpu.max").split())
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", controllers):
                for folder in _around(root / GROUPS / mount, group):
                    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                    yield from _quota(*(_read(folder / name).strip() for name in names))


def _around(mount: Path, group: str) -> Iterator[Path]:
    """A group's folder and those above it; a container may see its own as the topmost."""
    folder = mount / group.lstrip("/")
    yield from (one for one in (folder, *folder.parents) if one.is_relative_to(mount))


def _quota(*given: str) -> Iterator[float]:
    """Quota over period, both in microseconds; `max` and -1 mean no limit."""
    if len(given) == 2 and all(one.isdecimal() for one in given) and int(given[1]):
        yield int(given[0]) / int(given[1])


def _read(path: Path) -> str:
    """The text of a system file; empty if it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
