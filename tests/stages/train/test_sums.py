from types import SimpleNamespace

import torch

from align.stages.train.step import Sums, added, finite, means_of

ALONE = SimpleNamespace(total=lambda values: values)


def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_micro_batches_of_unequal_size_are_no_mean_of_means():
    sums = Sums()
    sums.add({"loss": values(1, 2, 3)})
    sums.add({"loss": values(9)})
    assert means_of(sums.totals(ALONE)) == {"loss": 15 / 4}  # the mean of their means is 5.5


def test_a_name_without_a_value_is_left_out():
    sums = Sums()
    sums.add({"rewards/chosen": values(2), "rewards/rejected": values()})
    sums.add({"rewards/chosen": values(), "rewards/rejected": values()})
    assert means_of(sums.totals(ALONE)) == {"rewards/chosen": 2.0}


def test_a_value_that_only_another_rank_has_is_known_here_too():
    other = torch.tensor([[7.0, 2.0], [5.0, 1.0]], dtype=torch.float64)  # totals, counts
    sums = Sums()
    sums.add({"rewards/rejected": values(), "loss": values(2)})
    peers = SimpleNamespace(total=lambda values: values + other)
    assert means_of(sums.totals(peers)) == {
        "loss": 3.0,
        "rewards/rejected": 5.0,
    }  # (2 + 7) / 3, 5 / 1


def test_nothing_added_has_no_mean():
    assert means_of(Sums().totals(ALONE)) == {}


def test_small_values_are_not_lost_beside_a_large_one():
    sums = Sums()
    sums.add({"loss": torch.tensor([2.0**25])})
    sums.add({"loss": torch.tensor([1.0])})  # 2^25 + 1 is no float32
    assert means_of(sums.totals(ALONE)) == {"loss": (2**25 + 1) / 2}


def test_what_is_added_keeps_no_graph_alive():
    sums = Sums()
    sums.add({"loss": values(1, 2).requires_grad_()})
    assert not any(total.requires_grad for total in sums._totals.values())


def test_several_steps_are_no_mean_of_means_either():
    line = added(added({}, {"loss": (6.0, 3.0), "nll": (1.0, 1.0)}), {"loss": (9.0, 1.0)})
    assert means_of(line) == {"loss": 15 / 4, "nll": 1.0}


def test_what_is_not_finite_is_added_to_nothing():
    assert finite({"loss": (1.0, 1.0), "grad_norm": (float("inf"), 1.0)}) == {"loss": (1.0, 1.0)}
