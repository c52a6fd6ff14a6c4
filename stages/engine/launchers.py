"""Rank and world size of this process, from its launcher's environment."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...schemas.batches import World
from ...schemas.errors import UsageError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launcher_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun, from the variables of any launcher."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        found = {name: environment[name] for name in NAMES if name in environment}
        return {"LOCAL_RANK": "0"} | found if found["WORLD_SIZE"] == "1" else found
    return slurm_environment(environment) or {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def world_of(environment: Mapping[str, str]) -> World:
    """Rank, size and local rank; inconsistent ones are refused."""
    names = NAMES if environment["WORLD_SIZE"] != "1" else NAMES[:3]
    if missing := [name for name in names if name not in environment]:
        raise UsageError(
            f"{' and '.join(missing)} not set, although RANK and WORLD_SIZE are. Start the ranks "
            "with torchrun, deepspeed or srun, or unset RANK and WORLD_SIZE to run alone."
        )
    values = [environment[name] for name in NAMES[:3]]
    if not all(value.isdigit() for value in values) or int(values[0]) >= int(values[1]):
        shown = ", ".join(f"{name}={environment[name]}" for name in NAMES[:3])
        raise UsageError(f"{shown}: the rank is not below WORLD_SIZE. Start with a launcher.")
    if values[1] != "1" and environment["MASTER_PORT"] == "0":
        # torchrun passes it on, and ranks would wait for each other until they time out.
        raise UsageError("MASTER_PORT is 0, so ranks cannot connect. Use torchrun --standalone.")
    rank, size, local_rank = map(int, values)
    return World(rank=rank, size=size, local_rank=local_rank)


def world_apart(environment: Mapping[str, str]) -> World:
    """Rank and world size of a process that does not communicate with its peers."""
    nowhere = {"MASTER_ADDR": "", "MASTER_PORT": ""}
    return world_of({"LOCAL_RANK": "0"} | launcher_environment(environment) | nowhere)


def ranks_here(environment: Mapping[str, str]) -> int:
    """The number of ranks that torchrun or deepspeed started on this machine; 1 by default."""
    given = environment.get("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", ""))
    return max(1, int(given)) if given.isdecimal() else 1


FIRST_PORT, PORTS = 20_000, 20_000


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an srun task; empty unless srun started several."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    # A batch script that calls align without srun has a job and a task count, but no step.
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
    first, *_ = re.findall(r"(?:[^,\[]|\[[^]]*\])*", nodes)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first)


def _port(environment: Mapping[str, str]) -> str:
    """A port that is the same for every rank of a step, and another for the next step."""
    job, step = environment.get("SLURM_JOB_ID", "0"), environment["SLURM_STEP_ID"]
    digits = int(job if job.isdigit() else 0) * 31 + int(step if step.isdigit() else 0)
    return str(FIRST_PORT + digits % PORTS)
