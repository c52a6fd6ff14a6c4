"""Makes tasks in child processes, side by side: in as many as the machine has usable cores."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..schemas.errors import BadDataError
from ..stages.tracking.progress import NoProgress, Progress

Facts = TypeVar("Facts")
Facts_co = TypeVar("Facts_co", covariant=True)


class Work(Protocol[Facts_co]):
    """Work that is cut into tasks and can be sent to another process."""

    @property
    def name(self) -> str:
        """What progress calls it."""
        ...

    @property
    def unit(self) -> str:
        """What the sizes count."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """How much each task adds to the progress."""
        ...

    def is_committed(self, task: int) -> bool:
        """Whether what the task makes is there, whoever made it."""
        ...

    def open(self, progress: Progress) -> Callable[[int], Facts_co]:
        """A function that makes and commits a task in this process, and returns facts about it."""
        ...


def make_all(work: Work[Any], *, num_processes: int, progress: Progress) -> None:
    """Makes the tasks that are not committed yet; in this process if there are 0 others."""
    sizes = work.sizes
    todo = [task for task in range(len(sizes)) if not work.is_committed(task)]
    if not todo:
        return
    progress.begin(work.name, total=sum(sizes), unit=work.unit)
    progress.advance(sum(sizes) - sum(sizes[task] for task in todo))
    if num_processes == 0 or len(todo) == 1:
        make = work.open(progress)
        for task in todo:
            make(task)
    else:
        with closing(make_in_children(work, todo, num_processes=num_processes)) as made:
            for task, _ in made:
                progress.advance(sizes[task])
    progress.end()


def make_in_children(
    work: Work[Facts], tasks: Sequence[int], *, num_processes: int
) -> Generator[tuple[int, Facts]]:
    """Makes tasks in that many processes; yields each with its facts, in the order given."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([type(work).__module__])
    _start_server_ignoring_sigint()
    others = {*multiprocessing.active_children()}
    with ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=_start, initargs=(work,)
    ) as pool:
        waiting: deque[tuple[int, Future[Facts]]] = deque()
        try:
            for task in tasks:
                waiting.append((task, pool.submit(_make, task)))
                if len(waiting) > 2 * num_processes:
                    yield _finished(waiting)
            while waiting:
                yield _finished(waiting)
        except BrokenProcessPool as error:
            raise BadDataError(
                "A tokenizing process died, most likely for want of memory. "
                "Use fewer of them (--set data.workers=1) and look for very long rows."
            ) from error
        except BaseException:
            # A task takes seconds, and half a task leaves nothing that is ever read.
            for child in {*multiprocessing.active_children()} - others:
                child.kill()
            raise


def _finished(waiting: deque[tuple[int, Future[Facts]]]) -> tuple[int, Facts]:
    task, future = waiting.popleft()
    return task, future.result()


_make_task: Callable[[int], Any] | None = None


def _start(work: Work[Any]) -> None:
    global _make_task  # noqa: PLW0603 - opened once in each process
    # Each process keeps to one core; threads of the tokenizer would fight over them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Without a parent there is nothing left to do.
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _make_task = work.open(NoProgress())


def _start_server_ignoring_sigint() -> None:
    """Ignores Ctrl-C and hang-ups, which reach every process: the parent handles them."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set signals
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)
    }
    try:
        ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make(task: int) -> Any:
    assert _make_task is not None
    return _make_task(task)


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
