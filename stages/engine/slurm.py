"""What torchrun would set, read from the environment that srun sets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST_PORT, PORTS = 20_000, 20_000


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Empty unless srun started this process as one of several tasks."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    # A batch script that calls us without srun has a job and a task count, but no step.
    if tasks == "1" or "SLURM_STEP_ID" not in environment:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    found = {
        "RANK": environment.get("SLURM_PROCID", ""),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", ""),
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(nodes)),
        "MASTER_PORT": environment.get("MASTER_PORT", _port(environment)),
    }
    return {name: value for name, value in found.items() if value}


def first_host(nodes: str) -> str:
    """The first of `gpu[03-05,09],login1`: gpu03."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", _first_item(nodes))


def _first_item(nodes: str) -> str:
    found = re.match(r"(?:[^,\[]|\[[^]]*\])*", nodes)
    return found.group() if found else ""


def _port(environment: Mapping[str, str]) -> str:
    """The same for every rank of a step, and another for the next step."""
    job, step = environment.get("SLURM_JOB_ID", "0"), environment["SLURM_STEP_ID"]
    digits = int(job if job.isdigit() else 0) * 31 + int(step if step.isdigit() else 0)
    return str(FIRST_PORT + digits % PORTS)
