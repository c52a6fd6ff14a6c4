"""Makes tasks on this machine: in this process, or side by side in children of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from typing import Any

from ...schemas.errors import BadDataError
from ...stages.engine.launchers import ranks_here
from ...stages.tracking.progress import NoProgress, Progress
from .cores import usable_cores
from .executor import WHOLE, Facts, Runner, Share, Tasks


@dataclass(frozen=True)
class Inline:
    """Makes a share of the tasks in this process, one after the other."""

    share: Share = WHOLE

    def for_preparing(self, *, is_small: bool, workers: int) -> Runner:
        """All cores of this machine; each of the ranks here has children of its own."""
        cores = max(1, usable_cores() // ranks_here(os.environ))
        processes = workers or (0 if is_small else cores)
        return Children(self.share, processes) if processes else self

    def run(
        self, tasks: Tasks[Facts], *, progress: Progress, on_done: Callable[[Facts], None]
    ) -> None:
        """Tasks that another process commits meanwhile are not made."""
        chosen = self.share.of(tasks)
        total = sum(tasks.sizes[task] for task in chosen)
        progress.begin(tasks.name, total=total, unit=tasks.unit)

        def missing() -> Iterator[int]:
            for task in chosen:
                if tasks.is_committed(task):
                    progress.advance(tasks.sizes[task])
                else:
                    yield task

        with closing(tasks.open(progress)(missing())) as made:
            for facts in made:
                on_done(facts)
        progress.end()


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
_make_each: Callable[[Iterable[int]], Generator[Any]] | None = None


def _start(work: Tasks[Any]) -> None:
    global _work, _make_each
    # Each process keeps to one core; threads of the tokenizer would fight over them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Without a parent there is nothing left to do.
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _work, _make_each = work, work.open(NoProgress())


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
    assert _make_each is not None
    if _work.is_committed(task):
        return None
    (facts,) = _make_each([task])
    return facts
