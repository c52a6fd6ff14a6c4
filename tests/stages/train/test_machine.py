import numpy as np
import psutil

from align.stages.train.throughput import MEGA, Machine


def test_it_sees_this_machine(tmp_path):
    seen = Machine(tmp_path).now()
    assert all(name.startswith("system/") for name in seen)
    assert 0 <= seen["system/cpu_utilization_percentage"] <= 100
    assert 0 < seen["system/system_memory_usage_percentage"] <= 100
    total = psutil.virtual_memory().total / MEGA
    assert 0 < seen["system/system_memory_usage_megabytes"] < total
    assert seen["system/disk_available_megabytes"] > 0


def test_it_sees_what_this_process_takes(tmp_path):
    machine = Machine(tmp_path)
    before = machine.now()["system/process_memory_usage_megabytes"]
    held = np.ones(25_000_000)
    after = machine.now()["system/process_memory_usage_megabytes"]
    assert held.nbytes / MEGA == 200
    assert 150 < after - before < 250
