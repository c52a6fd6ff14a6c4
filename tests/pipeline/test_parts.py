"""Which items each of several processes makes, by the number of its part alone."""

import pytest

from align.pipeline.parts import Part, part_of
from align.schemas.errors import UsageError

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
