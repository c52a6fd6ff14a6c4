"""Runs work in actors of a Ray cluster, or of a local cluster that ends with the run.

Only item numbers and small results pass through Ray. An item may be done twice, so if its actor or
node dies, the next free actor does it again.
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
from ..schemas.errors import AlignError, Interrupted, ServerError, UsageError, unexpected_os_error
from .parts import Part
from .workers import HOW_THREADS_WAIT, usable_cores

Result = TypeVar("Result")

logger = logging.getLogger("align")

DEATHS = 3  # of actors at one item before the run fails
SECONDS_PER_LOOK = 1.0
OBJECT_STORE_BYTES = 128 * 1024 * 1024  # of a local cluster: no rows pass through it
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a late thread must not start a cluster of its own
}
# Ray does this by itself on other systems; it reads its environment at import.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Variables that the command sets for itself, and here for actors on other machines.
NO_KERNELS = {"USE_HUB_KERNELS": "0"}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # in Ray's messages


def require_executor(options: ScoringOptions, part: Part | None) -> None:
    """Refuses Ray for a part, or if it is not installed; does not import it."""
    if options.executor != "ray":
        return
    if part:
        raise UsageError(
            "--executor ray: a part, or a rank, works in its own process. Leave out one of them."
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
    """Each item with the function's result, in order of completion; `noun` names an item.

    The function is sent to each actor once, so it may keep what it opens for the next item. Without
    an address, a local cluster is started for this run. Each worker gets `gpus` GPUs. 0 workers
    means one per GPU or machine, None means one per core.
    """
    with _connected(address) as ray:
        make = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_Actor)
        waiting, deaths = deque(items), Counter[int | None]()
        idle: list[Any] = []
        pending: dict[Any, tuple[Any, int | None]] = {}  # by Ray's reference to the result

        def begin() -> None:
            actor = make.remote(function)
            pending[actor.ready.remote()] = actor, None

        for _ in range(min(workers or _count(ray, workers, gpus), len(items))):
            begin()
        while waiting or any(item is not None for _, item in pending.values()):
            # An actor without room in the cluster never becomes ready, and gets no item.
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
                            f"no actor can start ({_in_short(error)})."
                            if item is None
                            else f"{DEATHS} actors died at {noun} {item}. If memory ran out, "
                            "lower --max-length; the same command continues."
                        )
                        raise ServerError(f"--executor ray: {why}") from error
                    logger.warning("A Ray actor died: another one does its work.")
                    waiting.extend([] if item is None else [item])
                    begin()
                    continue
                idle.append(actor)
                if item is None:
                    deaths[None] = 0
                else:
                    yield item, _taken(made)


def _count(ray: Any, workers: int | None, gpus: float) -> int:
    """The number of actors: the requested one, or one per GPU, machine or core."""
    resources = ray.cluster_resources()
    if workers is None:
        found = int(resources.get("CPU", 1))
    elif gpus:
        found = int(resources.get("GPU", 0) / gpus)
    else:
        found = sum(node["Alive"] for node in ray.nodes())
    return max(1, found)


class _Actor:
    """A process of the cluster; it returns its errors and warnings to this process."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function
        self._warnings: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._warnings.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)

    def ready(self) -> None:
        """Returns once the actor has a place in the cluster."""

    def make(self, item: int) -> tuple[Any, AlignError | None, list[str]]:
        """The function's result for an item, its error, and its warnings."""
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
    """The function's result; its warnings are logged here, and its error is raised."""
    result, refusal, warnings = made
    for line in warnings:
        logger.warning("%s", line)
    if refusal:
        raise refusal
    return result


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster; a local one is only on loopback, and ends with the block."""
    # A token keeps other users of the machine out of a local cluster.
    own = LOOPBACK | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    values = SETTINGS if address else SETTINGS | own
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    handler = signal.getsignal(signal.SIGTERM)
    folder = tempfile.mkdtemp(prefix="align-ray-")
    try:
        import ray  # noqa: PLC0415 - slow and optional

        try:
            _join(ray, address, folder)
            _take_back(handler)
            yield ray
        except ray.exceptions.RayTaskError:  # align's own error in an actor, with its traceback
            raise
        except SystemError as error:
            # Ray's C code looks for signals while it waits, and wraps what their handler raises.
            if isinstance(error.__cause__, Interrupted):
                raise error.__cause__ from None
            raise
        except ray.exceptions.RayError as error:
            raise ServerError(
                f"--executor ray: Ray failed ({_in_short(error)}). Check the cluster, then run the "
                "same command again: finished work is kept."
            ) from error
        finally:
            ray.shutdown()  # ends the actors, and a local cluster
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
        # Checked first, because Ray itself waits many minutes for HOST:PORT to answer.
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), timeout=30).close()
        ray.init(
            address=address or "local",  # RAY_ADDRESS is ignored
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            **(elsewhere if address else own),
        )
    except Exception as error:  # Ray raises many types
        where = f"--ray-address {address}: the cluster cannot be joined" if address else ""
        raise ServerError(
            f"{where or '--executor ray: no cluster could be started here'} ({_in_short(error)}). "
            "Check `ray status`, then run the same command again."
        ) from error


def _in_short(error: Exception) -> str:
    """An error's type, with the first and the last line of its text."""
    lines = [line.strip() for line in COLOURS.sub("", str(error)).splitlines() if line.strip()]
    ends = dict.fromkeys((*lines[:1], *lines[-1:]))
    return ": ".join((type(error).__name__, *ends)).rstrip(".")


def _take_back(handler: Any) -> None:
    """Restores the handler of SIGTERM, which Ray replaces by its own."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
