"""The numbers of a step: its learning rate, and the means of what was measured."""

from types import SimpleNamespace

import pytest
import torch

from align.schemas.config import TrainOptions
from align.stages.train.step import Sums, added, finite, learning_rate, means_of, warmup_steps

ALONE = SimpleNamespace(total=lambda values: values)


def rates(steps, **options):
    """The rates of these steps out of ten, at most 8."""
    chosen = TrainOptions(lr=8.0, **{"warmup": 0.0, **options})
    return [learning_rate(step, 10, chosen) for step in steps]


def test_the_rate_rises_in_equal_parts_and_falls_as_the_schedule_says():
    # 4 steps of rise: a quarter, a half, three quarters, all of it; then it is kept.
    assert rates(range(6), warmup=4, schedule="constant") == [2, 4, 6, 8, 8, 8]
    # 2 steps of rise leave 8 of fall, each of an eighth.
    assert rates([2, 3, 6, 9], warmup=0.2, schedule="linear") == pytest.approx([8, 7, 4, 1])
    # From 8 to a quarter of it, 2: 6 in ten steps.
    found = rates([0, 5, 9], schedule="linear", min_lr=0.25)
    assert found == pytest.approx([8, 8 - 5 * 0.6, 8 - 9 * 0.6])
    # cos(pi / 2) = 0, and cos(9 pi / 10) = -0.9510565
    found = rates([0, 5, 9], schedule="cosine")
    assert found == pytest.approx([8, 4, 4 * (1 - 0.9510565)], rel=1e-6)
    # Halfway between 8 and 2, and there to the end.
    assert rates([0, 5, 10, 12], schedule="cosine", min_lr=0.25) == pytest.approx([8, 5, 2, 2])


@pytest.mark.parametrize(
    ("warmup", "total", "steps"),
    [(0.0, 10, 0), (0.1, 10, 1), (0.1, 25, 3), (0.07, 100, 7), (1.0, 10, 1), (30.0, 10, 30)],
)
def test_a_warmup_below_1_is_a_share_and_any_other_a_number_of_steps(warmup, total, steps):
    assert warmup_steps(total, TrainOptions(warmup=warmup)) == steps


def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def means(*parts, peers=ALONE):
    sums = Sums()
    for part in parts:
        sums.add(part)
    return means_of(sums.totals(peers))


def test_micro_batches_and_steps_of_unequal_size_are_no_mean_of_means():
    # The mean of their means is 5.5.
    assert means({"loss": values(1, 2, 3)}, {"loss": values(9)}) == {"loss": 15 / 4}
    line = added(added({}, {"loss": (6.0, 3.0), "nll": (1.0, 1.0)}), {"loss": (9.0, 1.0)})
    assert means_of(line) == {"loss": 15 / 4, "nll": 1.0}


def test_a_name_without_a_value_is_left_out_unless_another_rank_has_one():
    nothing = {"rewards/rejected": values()}
    assert means() == {}
    assert means({"rewards/chosen": values(2), **nothing}, nothing) == {"rewards/chosen": 2.0}
    other = torch.tensor([[7.0, 2.0], [5.0, 1.0]], dtype=torch.float64)  # totals, counts
    peers = SimpleNamespace(total=lambda values: values + other)
    found = means({"loss": values(2), **nothing}, peers=peers)
    assert found == {"loss": 3.0, "rewards/rejected": 5.0}  # (2 + 7) / 3, 5 / 1


def test_small_values_are_not_lost_beside_a_large_one_and_keep_no_graph_alive():
    large, one = torch.tensor([2.0**25]), torch.tensor([1.0], requires_grad=True)
    assert means({"loss": large}, {"loss": one}) == {"loss": (2**25 + 1) / 2}  # no float32
    sums = Sums()
    sums.add({"loss": one * 2})
    assert not any(total.requires_grad for total in sums._totals.values())


def test_what_is_not_finite_is_added_to_nothing():
    assert finite({"loss": (1.0, 1.0), "grad_norm": (float("inf"), 1.0)}) == {"loss": (1.0, 1.0)}
