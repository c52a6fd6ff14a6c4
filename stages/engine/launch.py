"""Joins this process to its peers, whoever launched them."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ...schemas.batches import World
from ...schemas.errors import UsageError
from .heartbeat import heartbeat
from .peers import close_patient_group, open_patient_group
from .quiet import deepspeed, while_training
from .slurm import slurm_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TIMEOUT = timedelta(seconds=600)
_HASH_STORE: Any = vars(distributed)["HashStore"]  # its stub exports no stores
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def joined_world() -> Iterator[World]:
    """The process group of torchrun, deepspeed or srun, or of this process alone."""
    environment = launcher_environment(os.environ)
    world = world_of(environment)
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    hook = sys.excepthook  # torch sets its own
    try:
        with while_training(), torch.random.fork_rng(devices=_devices(world)):
            _join(world)
            with heartbeat(world):
                yield world
    finally:
        _leave()
        _restore(before)
        sys.excepthook = hook


def launcher_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, from whichever launcher started this process."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        found = {name: environment[name] for name in NAMES if name in environment}
        return {"LOCAL_RANK": "0"} | found if found["WORLD_SIZE"] == "1" else found
    return slurm_environment(environment) or {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def world_of(environment: Mapping[str, str]) -> World:
    """Reads rank, size and local rank; they are refused where they make no sense."""
    names = NAMES if environment["WORLD_SIZE"] != "1" else NAMES[:3]
    if missing := [name for name in names if name not in environment]:
        raise UsageError(
            f"{' and '.join(missing)} not set, though RANK and WORLD_SIZE are. Start the ranks "
            "with torchrun, deepspeed or srun, or unset RANK and WORLD_SIZE to run alone."
        )
    values = [environment[name] for name in NAMES[:3]]
    if not all(value.isdigit() for value in values) or int(values[0]) >= int(values[1]):
        shown = ", ".join(f"{name}={environment[name]}" for name in NAMES[:3])
        raise UsageError(f"{shown}: these are no rank among peers. Start with a launcher.")
    if values[1] != "1" and environment["MASTER_PORT"] == "0":
        # torchrun passes it on as it is, and ranks would wait at it until they time out.
        raise UsageError("MASTER_PORT is 0, where no rank can meet. Use torchrun --standalone.")
    rank, size, local_rank = map(int, values)
    return World(rank=rank, size=size, local_rank=local_rank)


def _join(world: World) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    if world.size == 1:
        # A store in memory needs no port, so any number of runs may start at one moment.
        alone: Any = {"store": _HASH_STORE(), "rank": 0, "world_size": 1}
        distributed.init_process_group(backend, timeout=TIMEOUT, **alone)
        return
    try:
        distributed.init_process_group(backend, timeout=TIMEOUT)
        open_patient_group()
    except (distributed.DistError, ValueError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UsageError(
            f"rank {world.rank} of {world.size} cannot join its peers at {place} "
            f"({str(error).splitlines()[0]}). Check that every rank was started and that the "
            "address can be reached from each machine."
        ) from error


def _devices(world: World) -> list[int]:
    """The GPU of a rank, where there is one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [world.local_rank % count] if count else []


def _leave() -> None:
    close_patient_group()
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
