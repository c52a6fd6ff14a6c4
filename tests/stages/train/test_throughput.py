from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from align.schemas.batches import Cursor, MicroBatch, StepBatch
from align.schemas.errors import CorruptionError
from align.schemas.rows import Tree
from align.stages.train import throughput as meter_module
from align.stages.train.step import added, means_of
from align.stages.train.synchronized import next_batch
from align.stages.train.throughput import MEGA, Machine, Meter, forget_peak, peak_mib
from support.training_world import NEVER

ALONE = SimpleNamespace(total=lambda values: values)


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    return clock


def micro_batch(*lengths):
    """Rows of so many tokens: a prompt, and a completion of one token."""
    token = np.zeros(1, dtype=np.int32)
    nothing = np.empty(0)
    return MicroBatch(
        trees=tuple(Tree(np.zeros(length - 1, dtype=np.int32), (token,)) for length in lengths),
        roles=nothing.astype(np.int8),
        reference=nothing,
        scores=nothing,
        places=nothing.astype(np.int64),
        reference_tokens=None,
        carried={},
        row_ids=(),
    )


def test_neither_what_lies_before_a_restart_nor_a_step_of_its_own_belongs_to_the_next(clock):
    meter = Meter(pads=False)
    meter.runs(tokens=100, padded=100)
    clock.now += 60  # an evaluation
    meter.restart()
    clock.now += 1
    assert means_of(meter.lap(rows=1))["speed/tokens_per_second"] == 100

    def late():
        clock.now += 3
        raise CorruptionError("part-3 is damaged")
        yield

    with pytest.raises(CorruptionError):  # a wait that fails is counted all the same
        next_batch(ALONE, late(), meter, NEVER)
    assert means_of(meter.lap(rows=1))["speed/data_wait_seconds"] == 3


@pytest.mark.parametrize(("pads", "padding"), [(False, 0.0), (True, 1 - 22 / 27)])
def test_padding_is_the_share_of_tokens_that_fill_up_micro_batches(pads, padding):
    meter = Meter(pads=pads)
    batch = StepBatch(
        cursor=Cursor(0, 0),
        own=(micro_batch(3, 5), micro_batch(2), micro_batch()),  # 10 tokens in 2 * 5 + 2
        mismatched=(micro_batch(4, 3, 5),),  # 12 in 3 * 5
        rows=3,
        branches=3,
        tokens=3,
        chosen_tokens=3,
        mismatched_branches=3,
    )
    next_batch(ALONE, iter([batch]), meter, NEVER)
    means = means_of(meter.lap(rows=3))
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
    assert means_of(laps[1])["speed/data_wait_seconds"] == 0.5
    means = means_of(added(*laps))
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
    monkeypatch.setattr(meter_module, "STATUS", tmp_path / "not" / "there")
    assert peak_mib() >= 0.5 * before  # also on a system that hides its processes


def test_it_sees_this_machine_and_what_this_process_takes(tmp_path):
    machine = Machine(tmp_path)
    before = machine.now()
    assert all(name.startswith("system/") for name in before)
    assert 0 <= before["system/cpu_utilization_percentage"] <= 100
    total = psutil.virtual_memory().total / MEGA
    assert 0 < before["system/system_memory_usage_megabytes"] < total
    assert before["system/disk_available_megabytes"] > 0
    held, name = np.ones(25_000_000), "system/process_memory_usage_megabytes"
    assert held.nbytes / MEGA == 200
    assert 150 < machine.now()[name] - before[name] < 250
