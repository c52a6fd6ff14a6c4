"""The process group of this run, under any launcher."""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from ...schemas.batches import World
from ...schemas.errors import AlignError, PeerError, UsageError
from .deepspeed_compat import deepspeed, while_training
from .launchers import launcher_environment, world_of

logger = logging.getLogger("align")

TIMEOUT = timedelta(seconds=600)
# Other ranks wait while one hashes a cache or writes a model; a dead rank is noticed at once.
PATIENCE = timedelta(hours=2)
_ANSWER_SECONDS = 0.05  # between two polls of the store
_PATIENT_GROUP: list[Any] = []  # one process group, while there is more than one rank
_STORES: Any = vars(distributed)  # its stub exports no stores


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
            yield world
    finally:
        _PATIENT_GROUP.clear()
        if deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        sys.excepthook = hook


@contextmanager
def keeping_linear() -> Iterator[None]:
    """Restores torch's linear function, which ZeRO-3 replaces for the rest of the process."""
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def _join(world: World) -> None:
    """Opens the process groups."""
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    if world.size == 1:
        # An in-memory store needs no port, so any number of runs may start at the same time.
        alone: Any = {"store": _STORES["HashStore"](), "rank": 0, "world_size": 1}
        distributed.init_process_group(backend, timeout=TIMEOUT, **alone)
        return
    try:
        distributed.init_process_group(backend, timeout=TIMEOUT, **_rendezvous(world))
        _PATIENT_GROUP.append(distributed.new_group(backend="gloo", timeout=PATIENCE))
    except (distributed.DistError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UsageError(
            f"rank {world.rank} of {world.size} cannot join the other ranks at {address} "
            f"({str(error).splitlines()[0]}). Check that every rank was started and that each "
            "machine can reach the address."
        ) from error


def _rendezvous(world: World) -> dict[str, Any]:
    """The arguments of a process group in a store of its own.

    torchrun keeps one store when it restarts ranks, and old keys would mislead the new ranks. So
    rank 0 creates a fresh rendezvous id and answers each rank's one-time nonce with it; an answer
    to a dead rank is never read.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store, nonce = _STORES["TCPStore"](*address, None, False, TIMEOUT), uuid.uuid4().hex
    if world.rank:
        store.set(f"align/asks/{world.rank}", nonce)
        meeting = store.get(f"align/answer/{nonce}").decode()
        store.set(f"align/{meeting}/here/{world.rank}", "")
    else:
        meeting = nonce
        _answer_until_here(store, meeting, set(range(1, world.size)))
    of_meeting = _STORES["PrefixStore"](meeting, store)
    return {"store": of_meeting, "rank": world.rank, "world_size": world.size}


def _answer_until_here(store: Any, meeting: str, missing: set[int]) -> None:
    began = time.monotonic()
    while missing and time.monotonic() - began < TIMEOUT.total_seconds():
        for rank in sorted(missing):
            if store.check([f"align/{meeting}/here/{rank}"]):
                missing.remove(rank)
            elif store.check([f"align/asks/{rank}"]):
                nonce = store.get(f"align/asks/{rank}").decode()
                store.set(f"align/answer/{nonce}", meeting)
        time.sleep(_ANSWER_SECONDS)


def _devices(world: World) -> list[int]:
    """The GPU of a rank, if any, as a list."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [world.local_rank % count] if count else []


T = TypeVar("T")


def _patient_group() -> Any:
    """The group with the long timeout; None, the default group, if it is not open."""
    return _PATIENT_GROUP[0] if _PATIENT_GROUP else None


def run_on_rank_zero(world: World, action: Callable[[], T]) -> T:
    """The result of an action on rank zero, broadcast to all ranks; its AlignError is raised."""
    result: Any = _outcome(action) if world.rank == 0 else None
    if world.size > 1:
        box = [result]
        distributed.broadcast_object_list(box, src=0, group=_patient_group())
        result = box[0]
    opened: T = _opened(result)
    return opened


def run_on_all_ranks(world: World, action: Callable[[], T]) -> T:
    """This rank's result of an action that all ranks run; an AlignError is raised on all ranks."""
    own = _outcome(action)
    refusal = own if isinstance(own, AlignError) else None
    for other in gathered(world, refusal):
        _opened(other)
    return own  # type: ignore[return-value]


def gathered(world: World, mine: T) -> list[T]:
    """The values of all ranks, in rank order."""
    if world.size == 1:
        return [mine]
    every: list[Any] = [None] * world.size
    distributed.all_gather_object(every, mine, group=_patient_group())
    return every


def agreed(world: World, holds: bool) -> bool:
    """Whether `holds` is true on every rank."""
    return all(gathered(world, holds))


def _outcome(action: Callable[[], T]) -> T | AlignError:
    try:
        return action()
    except AlignError as error:
        return error


def _opened(result: Any) -> Any:
    if isinstance(result, AlignError):
        raise result
    return result


def total(values: Tensor) -> Tensor:
    """The sum over ranks, on every rank; the argument is not changed."""
    summed = values.detach().to(torch.float64, copy=True)
    distributed.all_reduce(summed)
    return summed


@contextmanager
def naming_lost_peers(world: World) -> Iterator[None]:
    """Raises the failure of a collective call as a PeerError: another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not _is_of_a_collective(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise PeerError(
            f"Rank {world.rank} lost another rank ({first_line}), whose message has the reason. "
            "Start all ranks again with --resume auto."
        ) from error


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Whether an error is of a collective call; Gloo's errors have no type of their own."""
    return isinstance(error, distributed.DistError) or "gloo" in str(error)
