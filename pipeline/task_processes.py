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
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from ..schemas.errors import BadDataError
from ..stages.tracking.progress import NoProgress, Progress
from .executor import Facts, Inline, Share, Tasks


@dataclass(frozen=True)
class Children:
    """Makes a share of the tasks in child processes, side by side; a single one in this process."""

    share: Share
    processes: int

    def run(
        self, tasks: Tasks[Facts], *, progress: Progress, on_done: Callable[[Facts], None]
    ) -> None:
        """Tasks that another process commits meanwhile are not made."""
        chosen, sizes = self.share.of(tasks), tasks.sizes
        todo = [task for task in chosen if not tasks.is_committed(task)]
        if len(todo) < 2:
            Inline(self.share).run(tasks, progress=progress, on_done=on_done)
            return
        progress.begin(tasks.name, total=sum(sizes[task] for task in chosen), unit=tasks.unit)
        progress.advance(sum(sizes[task] for task in {*chosen} - {*todo}))
        with closing(_in_children(tasks, todo, num_processes=self.processes)) as made:
            for task, facts in made:
                progress.advance(sizes[task])
                if facts is not None:
                    on_done(facts)
        progress.end()


def _in_children(
    work: Tasks[Facts], tasks: Sequence[int], *, num_processes: int
) -> Generator[tuple[int, Facts | None]]:
    """Each task with its facts, in the order given; without facts if another has made it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([type(work).__module__])
    _start_server_ignoring_sigint()
    others = {*multiprocessing.active_children()}
    with ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=_start, initargs=(work,)
    ) as pool:
        waiting: deque[tuple[int, Future[Facts | None]]] = deque()
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


def _finished(waiting: deque[tuple[int, Future[Facts | None]]]) -> tuple[int, Facts | None]:
    task, future = waiting.popleft()
    return task, future.result()


_work: Tasks[Any] | None = None
_make_task: Callable[[int], Any] | None = None


def _start(work: Tasks[Any]) -> None:
    global _work, _make_task
    # Each process keeps to one core; threads of the tokenizer would fight over them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Without a parent there is nothing left to do.
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _work, _make_task = work, work.open(NoProgress())


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
    assert _work is not None
    assert _make_task is not None
    return None if _work.is_committed(task) else _make_task(task)


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
