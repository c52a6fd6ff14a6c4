"""Executors: which process makes which tasks of a step, and in which order.

A task that is made twice leaves equal bytes and one commit. So an executor may begin a task again
at any time and anywhere, and no process needs a lock, or a message from another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Protocol, TypeVar

from ...schemas.errors import UsageError
from ...stages.engine.launchers import world_apart
from ...stages.tracking.progress import Progress

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


PART = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Share:
    """One of so many parts of the tasks, split by their cost."""

    number: int = 1  # from 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @staticmethod
    def read(text: str) -> Share:
        """Reads `2/8`."""
        found = PART.fullmatch(text)
        if not found or int(found[1]) > int(found[2]):
            raise UsageError(
                f"--part {text}: expected I/N, the I-th of N parts, from 1/N to N/N; for example "
                "--part 2/8."
            )
        return Share(int(found[1]), int(found[2]))

    def of(self, tasks: Tasks[Facts]) -> list[int]:
        """The tasks this part makes, the most expensive first; of an input all, its own first."""
        costs = tasks.costs
        order = sorted(range(len(costs)), key=lambda task: (-costs[task], task))
        parts = _split(order, costs, self.count)
        own = [task for task in order if parts[task] == self.number - 1]
        if not tasks.is_input:
            return own
        # From the other end: what the other parts have not begun, if they are at it.
        return own + [task for task in reversed(order) if parts[task] != self.number - 1]


WHOLE = Share()


def share_of(part: str | None, environment: Mapping[str, str]) -> Share | None:
    """The part this process makes: the given one, or its rank's; None for the whole."""
    world = world_apart(environment)
    if part and world.size > 1:
        raise UsageError(
            "--part: this is one of several ranks, each of which makes its own part. Leave it out."
        )
    if part:
        return Share.read(part)
    return Share(world.rank + 1, world.size) if world.size > 1 else None


def _split(order: Sequence[int], costs: Sequence[float], count: int) -> dict[int, int]:
    """The part of each task: the next in order goes to the part that has the least so far."""
    loads = [(0.0, part) for part in range(count)]
    heapify(loads)
    parts = {}
    for task in order:
        load, part = loads[0]
        parts[task] = part
        heapreplace(loads, (load + costs[task], part))
    return parts
