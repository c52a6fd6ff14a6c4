"""Work in child processes: each item once, and no child outlives its parent's interest."""

import multiprocessing
import time
from contextlib import closing

import pytest

from align.pipeline.workers import run_in_processes
from align.schemas.errors import BadDataError, UsageError
from support.deadly import Squares
from support.patience import PATIENCE
from support.stage_one import CHILDREN


@pytest.fixture
def other():
    """A child of whoever calls."""
    child = CHILDREN.Process(target=time.sleep, args=(PATIENCE,))
    child.start()
    yield child
    child.kill()
    child.join()


def test_each_item_is_made_once():
    made = dict(run_in_processes(Squares(), range(9), 2))
    assert made == {item: item * item for item in range(9)}


@pytest.mark.parametrize(
    ("fault", "refused"), [({"fails": 3}, UsageError), ({"kills": 3}, BadDataError)]
)
def test_an_error_or_a_dead_child_ends_the_work_and_all_of_its_children(other, fault, refused):
    with pytest.raises(refused, match="item 3|data.workers"):
        dict(run_in_processes(Squares(**fault), range(9), 2))
    assert multiprocessing.active_children() == [other]


def test_who_wants_no_more_waits_for_no_child(other):
    with closing(run_in_processes(Squares(), range(99), 2)) as made:
        next(made)
    assert multiprocessing.active_children() == [other]
