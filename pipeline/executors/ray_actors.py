"""Makes tasks in the actors of a Ray cluster, or of one that lives as long as the run.

Only numbers of tasks and facts about them pass through Ray. An actor that dies is started again,
and its task with it.
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
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...schemas.config import ScoringOptions
from ...schemas.errors import AlignError, ServerError, UsageError, unexpected_os_error
from ...stages.tracking.progress import NoProgress, Progress
from .cores import HOW_THREADS_WAIT, usable_cores
from .executor import WHOLE, Facts, Runner, Tasks
from .processes import Inline

logger = logging.getLogger("align")

# With a whole core for each actor, Ray Data has none left for itself on a small machine, and waits.
CORES_PER_WORKER = 0.5
OBJECT_STORE_BYTES = 128 * 1024 * 1024  # of a cluster of our own: no rows pass through it
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a thread that outlives the run begins no cluster of its own
}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # in what Ray says
# As Ray does by itself on those two; it reads its environment when it is imported.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# What the command sets for itself, for workers on machines where it does not run.
NO_KERNELS = {"USE_HUB_KERNELS": "0"}


@dataclass(frozen=True)
class RayActors:
    """Makes all tasks in a pool of actors, each of which opens the tasks once."""

    address: str  # empty: a cluster on this machine, for this run
    workers: str  # MIN:MAX, or one number; empty: one for each GPU, or for each machine
    gpus: float  # of each worker
    cores: float = CORES_PER_WORKER  # of each worker

    @staticmethod
    def require(options: ScoringOptions) -> None:
        """Refuses what the settings alone, or a missing Ray, rule out."""
        workers_of(options.ray_workers)
        require_ray()

    @staticmethod
    def of(options: ScoringOptions, *, on_gpu: bool) -> RayActors:
        """As the options ask; without a number, a worker on GPUs has one."""
        gpus = options.ray_gpus_per_worker or float(on_gpu)
        return RayActors(options.ray_address, options.ray_workers, gpus)

    def for_preparing(self, *, is_small: bool, workers: int) -> Runner:
        """A cluster of many machines with a worker for each core; else this machine's cores."""
        if self.address and not is_small:
            return replace(self, workers="", gpus=0.0, cores=1.0)
        return Inline().for_preparing(is_small=is_small, workers=workers)

    def run(
        self, tasks: Tasks[Facts], *, progress: Progress, on_done: Callable[[Facts], None]
    ) -> None:
        """Tasks that another process commits meanwhile are not made."""
        order = WHOLE.of(tasks)
        todo = [task for task in order if not tasks.is_committed(task)]
        progress.begin(tasks.name, total=sum(tasks.sizes), unit=tasks.unit)
        progress.advance(sum(tasks.sizes) - sum(tasks.sizes[task] for task in todo))
        if todo:
            # Closed before Ray is: what makes the rows asks it until then.
            with _connected(self.address) as ray, closing(self._made(ray, tasks, todo)) as rows:
                for row in rows:
                    _take(row["made"], on_done)
                    progress.advance(tasks.sizes[row["task"]])
        progress.end()

    def _made(self, ray: Any, tasks: Tasks[Facts], todo: list[int]) -> Generator[Any]:
        """A row for each task; whatever Ray raises on the way is one message."""
        try:
            yield from self._rows(ray, tasks, todo)
        except Exception as error:
            raise ServerError(
                f"--executor ray: Ray gave up ({_in_short(error)}). See to its cluster, "
                "then run the same command again: finished shards are kept."
            ) from error

    def _rows(self, ray: Any, tasks: Tasks[Facts], todo: list[int]) -> Iterator[Any]:
        least, most = workers_of(self.workers) or (1, self._most_workers(ray))
        pool = ray.data.ActorPoolStrategy(
            min_size=min(least, len(todo)),
            max_size=min(most, len(todo)),
            max_tasks_in_flight_per_actor=1,  # a task that waits for one actor could run on another
        )
        rows = ray.data.from_items(
            [{"task": task} for task in todo], override_num_blocks=len(todo)
        ).map_batches(
            _Maker,
            fn_constructor_args=(tasks,),
            batch_size=1,
            compute=pool,
            num_cpus=self.cores,
            num_gpus=self.gpus or None,
        )
        return iter(rows.iter_rows())

    def _most_workers(self, ray: Any) -> int:
        """As many workers as have a GPU or a core each, or one for each machine."""
        if self.cores > CORES_PER_WORKER:
            return max(1, int(ray.cluster_resources().get("CPU", 1)) - 1)
        if self.gpus:
            gpus: float = ray.cluster_resources().get("GPU", 0)
            return max(1, int(gpus / self.gpus))
        return max(1, len([node for node in ray.nodes() if node["Alive"]]))


_COUNT = re.compile("[0-9]{1,9}")


def workers_of(text: str) -> tuple[int, int] | None:
    """Reads `2:8` or `4`; None for an empty text."""
    if not text:
        return None
    least, colon, most = text.partition(":")
    numbers = (least, most) if colon else (least, least)
    if not all(map(_COUNT.fullmatch, numbers)) or not 1 <= int(least) <= int(numbers[1]):
        raise UsageError(
            f"--ray-workers {text}: expected MIN:MAX or one number, each at least 1; for example "
            "1:8."
        )
    return int(least), int(numbers[1])


def require_ray() -> None:
    """Refuses to go on without Ray, which is an extra; does not import it."""
    if find_spec("ray") is None:
        raise UsageError(
            "--executor ray: Ray is not installed. Install it with "
            "`pip install 'align-cached-reference[ray]'`, or leave out --executor."
        )


@dataclass(frozen=True)
class _Made:
    """An actor's result of a task."""

    facts: Any  # None if the task was committed already
    error: AlignError | None
    crash: str  # the traceback of any other error, which might not survive the way here
    said: tuple[str, ...]  # warnings, which are logged where the run was started


def _take(made: _Made, on_done: Callable[[Any], None]) -> None:
    for line in made.said:
        logger.warning("%s", line)
    if made.error:
        raise made.error
    if made.crash:
        raise RuntimeError(f"in an actor of Ray:\n{made.crash}")
    if made.facts is not None:
        on_done(made.facts)


class _Maker:
    """One actor."""

    def __init__(self, tasks: Tasks[Any]) -> None:
        self._tasks = tasks
        self._make: Callable[[Iterable[int]], Generator[Any]] | None = None
        self._said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._said.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)

    def __call__(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Makes each task of a batch."""
        made = np.empty(len(batch["task"]), dtype=object)
        for index, task in enumerate(batch["task"].tolist()):
            made[index] = self._made(task)
        return {"task": batch["task"], "made": made}

    def _made(self, task: int) -> _Made:
        facts, refusal, crash = None, None, ""
        try:
            if not self._tasks.is_committed(task):
                # Not when the actor begins: Ray would begin it again and again.
                self._make = self._make or self._tasks.open(NoProgress())
                (facts,) = self._make([task])
        except AlignError as error:
            refusal = error
        except OSError as error:
            refusal = unexpected_os_error(error)
        except Exception:
            crash = traceback.format_exc()
        said = tuple(self._said)
        self._said.clear()
        return _Made(facts, refusal, crash, said)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster; one of our own is on loopback alone, and ends with the block."""
    with _environment(QUIET if address else QUIET | LOOPBACK | _own_token()):
        import ray  # noqa: PLC0415 - it takes seconds, and many do without it
        import ray.data  # noqa: PLC0415

        handler = signal.getsignal(signal.SIGTERM)
        folder = tempfile.mkdtemp(prefix="align-ray-")
        try:
            with _quiet_logs():
                with _silent_stderr():
                    _join(ray, address, folder)
                _take_back(handler)
                yield ray
        finally:
            _leave(ray)
            _take_back(handler)
            shutil.rmtree(folder, ignore_errors=True)


def _join(ray: Any, address: str, folder: str) -> None:
    own = {
        "_temp_dir": folder,
        "include_dashboard": False,
        "num_cpus": usable_cores(),
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    waiting = {name: os.environ[name] for name in HOW_THREADS_WAIT if name in os.environ}
    elsewhere = {"runtime_env": {"env_vars": {**QUIET, **NO_KERNELS, **waiting}}}
    try:
        _knock(address)
        ray.init(
            address=address or "local",  # RAY_ADDRESS, which was not asked for, is ignored
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            **(elsewhere if address else own),
        )
    except Exception as error:
        raise ServerError(
            f"--ray-address {address}: no cluster there can be joined ({_in_short(error)}). See to "
            "it (`ray status`), then run the same command again."
            if address
            else f"--executor ray: no cluster could be started here ({_in_short(error)}). Run the "
            "same command again when this machine is less busy, or leave out --executor."
        ) from error


def _knock(address: str) -> None:
    """Raises OSError where nobody listens at HOST:PORT, for whom Ray would wait many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=30).close()


def _leave(ray: Any) -> None:
    """A failure on the way out does not hide the error that ended the run."""
    try:
        ray.shutdown()
    except Exception as error:
        logger.warning("Ray did not end as it should: %s.", _in_short(error))


def _in_short(error: Exception) -> str:
    """The kind of an error, and of its text the first line and the last, which is often why."""
    lines = [line.strip() for line in COLOURS.sub("", str(error)).splitlines() if line.strip()]
    ends = dict.fromkeys((*lines[:1], *lines[-1:]))
    return ": ".join((type(error).__name__, *ends)).rstrip(".")


def _own_token() -> dict[str, str]:
    """Keeps other users of the machine out; Ray would write a token into the home folder."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _take_back(handler: Any) -> None:
    """Ray replaces the handler of SIGTERM by its own."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hides the line in which Ray's core prints its log level, which has no switch."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Ray logs the traceback of what it raises, which becomes a message here."""
    names = ("ray", "ray.data")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
