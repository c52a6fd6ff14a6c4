"""How many cores this process may use, which in a container is fewer than the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUPS = Path("sys/fs/cgroup")
OWN = Path("proc/self/cgroup")


def usable_cores(root: Path = Path("/")) -> int:
    """Those the system lets it run on, as far as the quota of its group allows; at least one."""
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
    """So much time in so much time, both in microseconds; `max` and -1 are no limit."""
    if len(given) == 2 and all(one.isdecimal() for one in given) and int(given[1]):
        yield int(given[0]) / int(given[1])


def _read(path: Path) -> str:
    """What a file of the system says; nothing where it is not there or not for us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
