"""The numbers of a step: its rate, the means of what was measured, its speed, and the machine."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from align.schemas.methods import Mean
from align.schemas.train_options import TrainOptions
from align.stages.train import memory, together
from align.stages.train.memory import forget_peak, peak_mib
from align.stages.train.step import Sums, added, finite, learning_rate, warmup_steps
from align.stages.train.together import Meter, StopConditions, Together

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


def test_a_warmup_below_1_is_a_share_and_any_other_a_number_of_steps():
    for warmup, total, steps in ((0.0, 10, 0), (0.1, 25, 3), (0.07, 100, 7), (1.0, 10, 1)):
        assert warmup_steps(total, TrainOptions(warmup=warmup)) == steps


def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def means(*parts, peers=ALONE):
    sums = Sums()
    for part in parts:
        sums.add(part)
    return values_of(sums.read(peers, {})[0])


def values_of(means):
    return {name: mean.value for name, mean in means.items()}


def test_micro_batches_and_steps_of_unequal_size_are_no_mean_of_means():
    # The mean of their means is 5.5.
    assert means({"loss": values(1, 2, 3)}, {"loss": values(9)}) == {"loss": 15 / 4}
    line = added(
        added({}, {"loss": Mean(6.0, 3.0), "nll": Mean(1.0, 1.0)}), {"loss": Mean(9.0, 1.0)}
    )
    assert values_of(line) == {"loss": 15 / 4, "nll": 1.0}


def test_a_name_without_a_value_is_left_out_unless_another_rank_has_one():
    nothing = {"rewards/rejected": values()}
    assert means() == {}
    assert means({"rewards/chosen": values(2), **nothing}, nothing) == {"rewards/chosen": 2.0}
    other = torch.tensor([7.0, 5.0, 2.0, 1.0], dtype=torch.float64)  # totals, counts
    peers = SimpleNamespace(total=lambda values: values + other)
    found = means({"loss": values(2), **nothing}, peers=peers)
    assert found == {"loss": 3.0, "rewards/rejected": 5.0}  # (2 + 7) / 3, 5 / 1


def test_small_values_are_not_lost_beside_a_large_one_and_keep_no_graph_alive():
    def without_graph(own):
        assert not own.requires_grad
        return own

    peers = SimpleNamespace(total=without_graph)
    large, one = torch.tensor([2.0**25]), torch.tensor([1.0], requires_grad=True)
    # No float32.
    assert means({"loss": large}, {"loss": one}, peers=peers) == {"loss": (2**25 + 1) / 2}


def test_what_is_not_finite_is_added_to_nothing():
    means = {"loss": Mean(1.0, 1.0), "grad_norm": Mean(math.inf, 1.0)}
    assert finite(means) == {"loss": Mean(1.0, 1.0)}


@pytest.fixture
def clock(monkeypatch):
    """One that is set by hand."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(together, "time", clock)
    return clock


def micro_batches(*some):
    """Each of rows of so many tokens."""
    return tuple(
        SimpleNamespace(trees=[SimpleNamespace(num_tokens=tokens) for tokens in rows])
        for rows in some
    )


def test_the_time_until_a_batch_is_read_is_measured(clock):
    def slowly():
        clock.now += 2
        yield SimpleNamespace(own=(), mismatched=())

    meter = Meter(pads=False)
    next(Together(ALONE, slowly(), meter, StopConditions()))
    assert values_of(meter.lap(rows=1))["speed/data_wait_seconds"] == 2


@pytest.mark.parametrize(("pads", "padding"), [(False, 0.0), (True, 1 - 22 / 27)])
def test_padding_is_the_share_of_tokens_that_fill_up_micro_batches(pads, padding):
    meter = Meter(pads=pads)
    own = micro_batches((3, 5), (2,), ())  # 10 tokens in 2 * 5 + 2
    mismatched = micro_batches((4, 3, 5))  # 12 in 3 * 5
    batch = SimpleNamespace(own=own, mismatched=mismatched)
    next(Together(ALONE, iter([batch]), meter, StopConditions()))
    means = values_of(meter.lap(rows=3))
    assert means["tokens"] == 22
    assert means["padding"] == pytest.approx(padding)


def test_the_speed_of_several_steps_is_that_of_all_of_them(clock):
    meter, laps = Meter(pads=True), []
    for seconds, tokens, padded in ((1, 100, 100), (3, 500, 1000)):
        meter.runs(tokens=tokens, padded=padded)
        with meter.waiting():
            clock.now += 0.5
        clock.now += seconds - 0.5
        laps.append(meter.lap(rows=4))
    assert values_of(laps[1])["speed/data_wait_seconds"] == 0.5
    means = values_of(added(*laps))
    assert means["speed/tokens_per_second"] == 150  # 600 in 4 s; the mean of both is 133
    assert means["speed/rows_per_second"] == 2
    assert means["speed/step_seconds"] == 2
    assert means["padding"] == pytest.approx(500 / 1100)
    assert means["tokens"] == 300  # of a step


def test_a_run_does_not_answer_for_the_memory_of_an_earlier_one(tmp_path, monkeypatch):
    forget_peak()
    before = peak_mib()
    assert before > 50  # torch alone takes more
    earlier = np.ones(64 * 2**20 // 8)
    assert peak_mib() > before + 50
    del earlier
    forget_peak()
    assert peak_mib() < before + 20
    monkeypatch.setattr(memory, "STATUS", tmp_path / "not" / "there")
    assert peak_mib() >= 0.5 * before  # also on a system that hides its processes
