"""Runs work in child processes, on the cores that this process may use."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, TypeVar

from ..schemas.errors import BadDataError

Result = TypeVar("Result")

# OpenMP's variables for whether waiting threads spin or sleep.
HOW_THREADS_WAIT = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def usable_cores(root: Path = Path("/")) -> int:
    """The number of cores that the system and control groups allow this process; at least 1."""
    allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    # The quotas of this process's group and of those around it; "max" is none.
    mount = root / "sys/fs/cgroup"
    own = mount / _text(root / "proc/self/cgroup").strip().partition("0::/")[2]
    for folder in (own, *own.parents):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal() and folder.is_relative_to(mount):
            allowed = min(allowed, math.ceil(int(quota) / max(int(period), 1)))
    return max(1, allowed)


def _text(path: Path) -> str:
    """The text of a system file; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def run_in_processes(
    function: Callable[[int], Result], items: Sequence[int], processes: int
) -> Generator[tuple[int, Result]]:
    """Each item with the function's result, in order of completion.

    The function is sent to each process once, so it may keep what it opens for the next item. An
    error, or a signal to this process, ends the children at once; unfinished items leave no files
    that are read.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    _start_server()
    others = {*multiprocessing.active_children()}  # of the calling program
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_begin, initargs=(function,)
    ) as pool:
        try:
            made = {pool.submit(_call, item): item for item in items}
            for future in as_completed(made):
                yield made[future], future.result()
        except BrokenProcessPool as error:
            raise BadDataError(
                "A tokenizing process died, most likely because memory ran out. Use fewer of them "
                "(--set data.workers=1), and check the data for very long rows."
            ) from error
        except BaseException:
            for child in {*multiprocessing.active_children()} - others:
                child.kill()
            raise


def _start_server() -> None:
    """Starts the server of children, which ignore Ctrl-C and hang-ups."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set signals
    ignored = (signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Worker:
    """The function of a child process, set by the pool's initializer."""

    function: Callable[[int], Any]


def _begin(function: Callable[[int], Any]) -> None:
    # Each process uses one core; the tokenizer's own threads would compete for cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _Worker.function = function


def _call(item: int) -> Any:
    return _Worker.function(item)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
