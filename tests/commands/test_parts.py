"""How work is parted: among ranks and cores, and among child processes that do not outlive it."""

import multiprocessing
import os
import time
from contextlib import closing

import pytest

from align.pipeline.parts import Part, part_of
from align.pipeline.workers import run_in_processes, usable_cores
from align.schemas.errors import BadDataError, UsageError
from support.deadly import Squares
from support.patience import PATIENCE
from support.stage_one import CHILDREN

COSTS = [3, 9, 1, 9, 5, 4, 2]
SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_parts_make_every_item_once_the_most_expensive_first(count):
    own = [Part(number + 1, count).of(COSTS) for number in range(count)]
    assert sorted(item for items in own for item in items) == [*range(len(COSTS))]
    assert all(items == sorted(items, key=lambda item: -COSTS[item]) for items in own)
    assert max(map(len, own)) - min(map(len, own)) <= 1


def test_what_all_parts_need_each_begins_with_its_own():
    assert Part(1, 2).first_of(COSTS) == [1, 4, 0, 2, 6, 5, 3]
    assert Part(2, 2).first_of(COSTS) == [3, 5, 6, 2, 0, 4, 1]


@pytest.mark.parametrize(
    ("given", "environment", "part"),
    [
        (None, {}, None),
        ("2/8", {}, Part(2, 8)),
        (None, {"RANK": "1", "WORLD_SIZE": "3"}, Part(2, 3)),
        (None, SRUN, Part(4, 4)),
    ],
)
def test_a_part_is_given_or_that_of_a_rank(given, environment, part):
    assert part_of(given, environment) == part


@pytest.mark.parametrize("given", ["0/2", "3/2", "1", "1/0", "-1/2", "a/b", "1/2/3", "01/2"])
def test_what_is_no_part_is_refused(given):
    with pytest.raises(UsageError, match="--part"):
        part_of(given, {})
    with pytest.raises(UsageError, match="--part"):
        part_of("1/2", SRUN)  # a rank has no part of its own


SEEN = len(os.sched_getaffinity(0))


# Files below the root of a system, and the cores that they leave; 0 of them where all are left.
QUOTAS = [
    ({"a/b/": "100000 100000\n"}, 1),
    ({"a/": "50000 100000", "a/b/": "max 100000"}, 1),
    ({"": "100000 100000"}, 1),  # its own group is all that it sees
    ({"a/b/": "max 100000"}, 0),
    ({"a/b/": "99900000 100000"}, 0),
    ({"a/b/": "nonsense"}, 0),
    ({"a/b/": "100000 0"}, 0),
]


def test_a_quota_of_any_group_around_the_process_counts(tmp_path):
    systems = []
    for quotas, cores in QUOTAS:
        files = {f"sys/fs/cgroup/{place}cpu.max": text for place, text in quotas.items()}
        systems.append(({"proc/self/cgroup": "0::/a/b\n", **files}, cores))
    assert usable_cores() <= usable_cores(tmp_path) == SEEN
    for number, (files, cores) in enumerate(systems):
        for name, text in files.items():
            (tmp_path / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(number) / name).write_text(text)
        assert usable_cores(tmp_path / str(number)) == (cores or SEEN), files


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
