"""Where the tasks of stage 1 are made: in this process, in children of it, or on Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Generic

from ...schemas.config import ScoringOptions
from ...schemas.errors import UsageError
from ...stages.engine.launchers import ranks_here
from ...stages.tracking.progress import NoProgress, Progress
from ..parts import WHOLE, Part
from ..ray_actors import RayCluster, require_ray
from ..workers import run_in_processes, usable_cores
from .executor import Executor, Facts, Runner, Tasks, tasks_of


def require_executor(options: ScoringOptions, part: Part | None) -> None:
    """Refuses, by the settings alone, an executor that there cannot be."""
    if options.executor == "inline":
        return
    if part:
        raise UsageError(
            f"--executor {options.executor}: a part, or a rank, works in its own process. Leave "
            "out one of the two."
        )
    require_ray()


def executor_of(options: ScoringOptions, part: Part | None, device: str) -> Executor:
    """The executor that the options ask for, of what computes on a device."""
    require_executor(options, part)
    if options.executor == "inline":
        return Inline(part or WHOLE)
    return OnRay(RayCluster.of(options, on_gpu=device == "cuda"))


@dataclass(frozen=True)
class Inline:
    """Makes a part of the tasks in this process, one after the other."""

    share: Part = WHOLE

    def for_preparing(self, *, is_small: bool, workers: int) -> Runner:
        """All cores of this machine; each of the ranks here has children of its own."""
        cores = max(1, usable_cores() // ranks_here(os.environ))
        processes = workers or (0 if is_small else cores)
        return Children(self.share, processes) if processes else self

    def run(
        self, tasks: Tasks[Facts], *, progress: Progress, on_done: Callable[[Facts], None]
    ) -> None:
        """Tasks that another process commits meanwhile are not made."""
        chosen = tasks_of(self.share, tasks)
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
    """Makes a part of the tasks in child processes; a single one in this process."""

    share: Part
    processes: int

    def run(
        self, tasks: Tasks[Facts], *, progress: Progress, on_done: Callable[[Facts], None]
    ) -> None:
        """Tasks that another process commits meanwhile are not made."""
        chosen = tasks_of(self.share, tasks)
        todo = [task for task in chosen if not tasks.is_committed(task)]
        if len(todo) < 2:
            Inline(self.share).run(tasks, progress=progress, on_done=on_done)
            return
        progress.begin(tasks.name, total=sum(tasks.sizes[task] for task in chosen), unit=tasks.unit)
        progress.advance(sum(tasks.sizes[task] for task in {*chosen} - {*todo}))
        _take(run_in_processes(_Maker(tasks), todo, self.processes), tasks, progress, on_done)


@dataclass(frozen=True)
class OnRay:
    """Makes all tasks in actors of a cluster."""

    cluster: RayCluster

    def for_preparing(self, *, is_small: bool, workers: int) -> Runner:
        """A cluster of many machines has an actor for each core; else this machine's cores."""
        if self.cluster.address and not is_small:
            return OnRay(replace(self.cluster, actors=0, gpus=0.0, is_per_core=True))
        return Inline().for_preparing(is_small=is_small, workers=workers)

    def run(
        self, tasks: Tasks[Facts], *, progress: Progress, on_done: Callable[[Facts], None]
    ) -> None:
        """Tasks that another process commits meanwhile are not made."""
        todo = [task for task in tasks_of(WHOLE, tasks) if not tasks.is_committed(task)]
        progress.begin(tasks.name, total=sum(tasks.sizes), unit=tasks.unit)
        progress.advance(sum(tasks.sizes) - sum(tasks.sizes[task] for task in todo))
        if todo:
            noun = f"{tasks.name}, task"
            _take(self.cluster.run(_Maker(tasks), todo, noun), tasks, progress, on_done)
        else:
            progress.end()


def _take(
    made: Generator[tuple[int, Facts | None]],
    tasks: Tasks[Facts],
    progress: Progress,
    on_done: Callable[[Facts], None],
) -> None:
    with closing(made):
        for task, facts in made:
            progress.advance(tasks.sizes[task])
            if facts is not None:
                on_done(facts)
    progress.end()


class _Maker(Generic[Facts]):
    """Makes tasks in another process, which opens them once."""

    def __init__(self, tasks: Tasks[Facts]) -> None:
        self.__module__ = type(tasks).__module__  # which children load once for all
        self._tasks = tasks
        self._make: Callable[[Iterable[int]], Generator[Facts]] | None = None

    def __call__(self, task: int) -> Any:
        """The facts of a task; None if it was committed already."""
        if self._tasks.is_committed(task):
            return None
        self._make = self._make or self._tasks.open(NoProgress())
        (facts,) = self._make([task])
        return facts
