"""Work in the actors of a Ray cluster, or of one on this machine that ends with the run.

Only numbers of items and small results pass through Ray. An item may be made twice, so one whose
actor or node died is made again by the next actor that is free.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

from ..schemas.config import ScoringOptions
from ..schemas.errors import AlignError, ServerError, UsageError, unexpected_os_error
from .parts import Part
from .workers import HOW_THREADS_WAIT, usable_cores

Result = TypeVar("Result")

logger = logging.getLogger("align")

DEATHS = 3  # of actors at one item, which then is the cause
SECONDS_PER_LOOK = 1.0
OBJECT_STORE_BYTES = 128 * 1024 * 1024  # of a cluster of our own: no rows pass through it
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a thread that outlives the run begins no cluster of its own
}
# As Ray does by itself on other systems; it reads its environment when it is imported.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# What the command sets for itself, for actors on machines where it does not run.
NO_KERNELS = {"USE_HUB_KERNELS": "0"}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # in Ray's messages


def require_executor(options: ScoringOptions, part: Part | None) -> None:
    """Refuses Ray for a part, or where it is not installed; does not import it."""
    if options.executor != "ray":
        return
    if part:
        raise UsageError(
            "--executor ray: a part, or a rank, works in its own process. Leave out one of the two."
        )
    if find_spec("ray") is None:
        raise UsageError(
            "--executor ray: Ray is not installed. Install it with "
            "`pip install 'align-cached-reference[ray]'`, or leave out --executor."
        )


def run_on_ray(
    function: Callable[[int], Result],
    items: Sequence[int],
    noun: str,
    address: str,
    workers: int | None,
    gpus: float,
) -> Generator[tuple[int, Result]]:
    """Each item with what the function makes of it, as they are done; `noun` names an item.

    The function is sent to each actor once, so what it opens it may keep for the next item. Without
    an address they are of a cluster on this machine, for this run. Each of the workers has so many
    GPUs; 0 workers are one for each GPU or machine, None is one for each core.
    """
    with _connected(address) as ray:
        make = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_Actor)
        waiting, deaths = deque(items), Counter[int | None]()
        idle: list[Any] = []
        pending: dict[Any, tuple[Any, int | None]] = {}  # by what Ray calls their result

        def begin() -> None:
            actor = make.remote(function)
            pending[actor.ready.remote()] = actor, None

        for _ in range(min(workers or _count(ray, workers, gpus), len(items))):
            begin()
        while waiting or any(item is not None for _, item in pending.values()):
            # An actor for which the cluster has no room is never ready, and gets no item.
            while waiting and idle:
                actor, number = idle.pop(), waiting.popleft()
                pending[actor.make.remote(number)] = actor, number
            done, _ = ray.wait([*pending], timeout=SECONDS_PER_LOOK)
            for result in done:
                actor, item = pending.pop(result)
                try:
                    made = ray.get(result)
                except ray.exceptions.RayActorError as error:
                    deaths[item] += 1
                    if deaths[item] == DEATHS:
                        why = (
                            f"no actor can begin ({_in_short(error)})."
                            if item is None
                            else f"{DEATHS} actors died at {noun} {item}. If for want of "
                            "memory, lower --max-length; the same command continues."
                        )
                        raise ServerError(f"--executor ray: {why}") from error
                    logger.warning("An actor of Ray died: another one does its work.")
                    waiting.extend([] if item is None else [item])
                    begin()
                    continue
                idle.append(actor)
                if item is None:
                    deaths[None] = 0
                else:
                    yield item, _taken(made)


def _count(ray: Any, workers: int | None, gpus: float) -> int:
    """How many actors there are where no number is asked for."""
    resources = ray.cluster_resources()
    if workers is None:
        found = int(resources.get("CPU", 1))
    elif gpus:
        found = int(resources.get("GPU", 0) / gpus)
    else:
        found = sum(node["Alive"] for node in ray.nodes())
    return max(1, found)


class _Actor:
    """A process of the cluster; it returns refusals and warnings for the process that began it."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function
        self._warnings: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._warnings.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)

    def ready(self) -> None:
        """Returns once the actor has a place in the cluster."""

    def make(self, item: int) -> tuple[Any, AlignError | None, list[str]]:
        """What the function makes of an item, its refusal, and the warnings meanwhile."""
        made, refusal = None, None
        try:
            made = self._function(item)
        except AlignError as error:
            refusal = error
        except OSError as error:
            refusal = unexpected_os_error(error)
        warnings, self._warnings[:] = [*self._warnings], []
        return made, refusal, warnings


def _taken(made: tuple[Any, AlignError | None, list[str]]) -> Any:
    """What the function has made; its warnings are logged here, and its refusal is raised."""
    result, refusal, warnings = made
    for line in warnings:
        logger.warning("%s", line)
    if refusal:
        raise refusal
    return result


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster; one of our own is on loopback alone, and ends with the block."""
    # A token keeps other users of the machine out of our own cluster.
    own = LOOPBACK | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    values = SETTINGS if address else SETTINGS | own
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    handler = signal.getsignal(signal.SIGTERM)
    folder = tempfile.mkdtemp(prefix="align-ray-")
    try:
        import ray  # noqa: PLC0415 - it takes seconds, and many do without it

        try:
            _join(ray, address, folder)
            _take_back(handler)
            yield ray
        except ray.exceptions.RayTaskError:  # an error of ours in an actor, with its traceback
            raise
        except ray.exceptions.RayError as error:
            raise ServerError(
                f"--executor ray: Ray gave up ({_in_short(error)}). See to its cluster, then run "
                "the same command again: what is finished is kept."
            ) from error
        finally:
            ray.shutdown()  # which ends the actors, and a cluster of our own
            _take_back(handler)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _join(ray: Any, address: str, folder: str) -> None:
    own = {
        "_temp_dir": folder,
        "include_dashboard": False,
        "num_cpus": usable_cores(),
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    waiting = {name: os.environ[name] for name in HOW_THREADS_WAIT if name in os.environ}
    elsewhere = {"runtime_env": {"env_vars": {**SETTINGS, **NO_KERNELS, **waiting}}}
    try:
        # Where nobody listens at HOST:PORT, Ray itself would wait for many minutes.
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), timeout=30).close()
        ray.init(
            address=address or "local",  # RAY_ADDRESS, which was not asked for, is ignored
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            **(elsewhere if address else own),
        )
    except Exception as error:  # of many kinds
        where = f"--ray-address {address}: no cluster can be joined there" if address else ""
        raise ServerError(
            f"{where or '--executor ray: no cluster could be started here'} ({_in_short(error)}). "
            "Look at `ray status`, then run the same command again."
        ) from error


def _in_short(error: Exception) -> str:
    """The kind of an error, and of its text the first line and the last, which is often why."""
    lines = [line.strip() for line in COLOURS.sub("", str(error)).splitlines() if line.strip()]
    ends = dict.fromkeys((*lines[:1], *lines[-1:]))
    return ": ".join((type(error).__name__, *ends)).rstrip(".")


def _take_back(handler: Any) -> None:
    """Ray replaces the handler of SIGTERM by its own."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
