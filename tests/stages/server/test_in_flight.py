"""What is in flight when a task fails is yielded, and only then the error is raised."""

import threading

import pytest

from align.stages.server.in_flight import in_groups
from support.patience import PATIENCE


def test_an_error_begins_nothing_more_and_costs_nothing_that_was_begun():
    """Of three at once one fails; the two beside it end only after that was noticed."""
    all_begun, noticed, begun = threading.Barrier(3, timeout=PATIENCE), threading.Event(), []

    def work(task):
        begun.append(task)
        all_begun.wait()
        if task == 1:
            raise ValueError("task 1")
        assert noticed.wait(PATIENCE)
        return task

    found = []
    groups = in_groups(iter(range(10)), work, most=3, stop=noticed.set)
    with pytest.raises(ValueError, match="task 1"):
        found.extend(one for group in groups for one in group)
    assert sorted(found) == [0, 2]
    assert sorted(begun) == [0, 1, 2]


def test_results_are_yielded_as_they_come_and_of_no_more_tasks_at_once_than_allowed():
    running, most_at_once, lock = 0, 0, threading.Lock()

    def work(task):
        nonlocal running, most_at_once
        with lock:
            running += 1
            most_at_once = max(most_at_once, running)
        with lock:
            running -= 1
        return task if task % 3 else None

    def stop():
        raise AssertionError("nothing failed")

    groups = [*in_groups(iter(range(30)), work, most=4, stop=stop)]
    assert sorted(one for group in groups for one in group) == [n for n in range(30) if n % 3]
    assert all(groups)
    assert most_at_once <= 4
