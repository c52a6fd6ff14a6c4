"""A bounded number of threads that run tasks, and the results in the order of completion."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Task = TypeVar("Task")
Done = TypeVar("Done")


@dataclass(frozen=True)
class _Outcome(Generic[Done]):
    """The result of a task, or its error."""

    done: Done | None = None
    error: BaseException | None = None


def in_groups(
    tasks: Iterator[Task],
    work: Callable[[Task], Done | None],
    *,
    most: int,
    stop: Callable[[], None],
) -> Iterator[list[Done]]:
    """Yields the results of `work` that are not None, each time all that are ready.

    What was yielded counts as in flight until the next group is asked for: wherever the caller
    ends, it lacks the outcomes of no more than `most` tasks. After an error no task is begun,
    `stop` is called, what is in flight is yielded, and the error is raised.
    """
    outcomes: SimpleQueue[_Outcome[Done]] = SimpleQueue()
    in_flight, error = 0, None
    while True:
        while error is None and in_flight < most and (task := next(tasks, None)) is not None:
            # A thread each, which is cheap beside a request, and does not delay the exit.
            threading.Thread(target=_run, args=(work, task, outcomes), daemon=True).start()
            in_flight += 1
        if not in_flight:
            break
        arrived = _arrived(outcomes)
        in_flight -= len(arrived)
        for outcome in arrived:
            if outcome.error is not None and error is None:
                error = outcome.error
                stop()
        done = [outcome.done for outcome in arrived if outcome.done is not None]
        if done:
            yield done
    if error is not None:
        raise error


def _run(
    work: Callable[[Task], Done | None], task: Task, outcomes: SimpleQueue[_Outcome[Done]]
) -> None:
    try:
        outcomes.put(_Outcome(done=work(task)))
    except BaseException as error:  # it is raised where the outcomes are read
        outcomes.put(_Outcome(error=error))


def _arrived(outcomes: SimpleQueue[_Outcome[Done]]) -> list[_Outcome[Done]]:
    """All outcomes that are ready; waits for the first."""
    arrived = [outcomes.get()]
    while True:
        try:
            arrived.append(outcomes.get_nowait())
        except Empty:
            return arrived
