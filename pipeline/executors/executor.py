"""Executors: which process makes which tasks of a step, and in which order.

A task that is made twice leaves equal bytes and one commit. So an executor may begin a task again
at any time and anywhere, and no process needs a lock, or a message from another one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol, TypeVar

from ...stages.tracking.progress import Progress
from ..parts import Part

Facts = TypeVar("Facts")
Facts_co = TypeVar("Facts_co", covariant=True)


class Tasks(Protocol[Facts_co]):
    """One kind of work, cut into tasks; it can be pickled and sent to another process."""

    @property
    def name(self) -> str:
        """Its name in the progress lines."""
        ...

    @property
    def unit(self) -> str:
        """The unit of the sizes."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """The progress that each task adds; there are as many tasks as sizes."""
        ...

    @property
    def costs(self) -> Sequence[float]:
        """The relative cost of each task."""
        ...

    @property
    def is_input(self) -> bool:
        """Whether what comes next reads what all of these tasks made."""
        ...

    def is_committed(self, task: int) -> bool:
        """Whether what the task makes is there, whoever made it."""
        ...

    def open(self, progress: Progress) -> Callable[[Iterable[int]], Generator[Facts_co]]:
        """A function that makes and commits tasks in this process, and gives the facts of each.

        It advances the progress by each task; executors that work elsewhere give it none. It may
        ask for a task before the one ahead of it is committed.
        """
        ...


def one_by_one(make: Callable[[int], Facts]) -> Callable[[Iterable[int]], Generator[Facts]]:
    """Makes each task when the one before is committed."""

    def make_each(tasks: Iterable[int]) -> Generator[Facts]:
        for task in tasks:
            yield make(task)

    return make_each


class Runner(Protocol):
    """A way to get tasks made."""

    def run(
        self, tasks: Tasks[Facts], *, progress: Progress, on_done: Callable[[Facts], None]
    ) -> None:
        """Returns once all tasks of its share are committed; `on_done` gets the facts of each.

        It begins and ends the progress, and advances it by the tasks that are committed already.
        """
        ...


class Executor(Runner, Protocol):
    """An executor of `scoring.executor`."""

    def for_preparing(self, *, is_small: bool, workers: int) -> Runner:
        """The runner that prepares rows, which takes cores and no model.

        Small data are prepared in this process; `workers` processes are what a user asks for.
        """
        ...


def tasks_of(part: Part, tasks: Tasks[Facts]) -> list[int]:
    """The tasks that a part makes, the most expensive first; of an input all, its own first."""
    return part.first_of(tasks.costs) if tasks.is_input else part.of(tasks.costs)
