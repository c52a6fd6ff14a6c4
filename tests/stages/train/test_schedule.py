import pytest

from align.schemas.config import TrainOptions
from align.stages.train.step import learning_rate, warmup_steps


def rates(steps, **options):
    """The rates of these steps out of ten, at most 8."""
    chosen = TrainOptions(lr=8.0, **{"warmup": 0.0, **options})
    return [learning_rate(step, 10, chosen) for step in steps]


def test_the_rate_rises_in_equal_parts_and_is_never_0():
    # 4 steps of rise: a quarter, a half, three quarters, all of it; then it is kept.
    assert rates(range(6), warmup=4, schedule="constant") == [2, 4, 6, 8, 8, 8]


def test_a_line_falls_to_where_it_ends_after_the_last_step():
    # 2 steps of rise leave 8 of fall, each of an eighth.
    assert rates([2, 3, 6, 9], warmup=0.2, schedule="linear") == pytest.approx([8, 7, 4, 1])


def test_a_line_with_a_floor_falls_less():
    # From 8 to a quarter of it, 2: 6 in ten steps.
    found = rates([0, 5, 9], schedule="linear", min_lr=0.25)
    assert found == pytest.approx([8, 8 - 5 * 0.6, 8 - 9 * 0.6])


def test_a_cosine_is_halfway_down_in_the_middle():
    # cos(pi / 2) = 0, and cos(9 pi / 10) = -0.9510565
    found = rates([0, 5, 9], schedule="cosine")
    assert found == pytest.approx([8, 4, 4 * (1 - 0.9510565)], rel=1e-6)


def test_a_cosine_with_a_floor_ends_there():
    # halfway between 8 and 2
    assert rates([0, 5, 10, 12], schedule="cosine", min_lr=0.25) == pytest.approx([8, 5, 2, 2])


@pytest.mark.parametrize(
    ("warmup", "total", "steps"),
    [(0.0, 10, 0), (0.1, 10, 1), (0.1, 25, 3), (0.07, 100, 7), (1.0, 10, 1), (30.0, 10, 30)],
)
def test_a_warmup_below_1_is_a_share_and_any_other_a_number_of_steps(warmup, total, steps):
    assert warmup_steps(total, TrainOptions(warmup=warmup)) == steps
