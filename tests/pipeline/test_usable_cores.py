import os
from pathlib import Path

import pytest

from align.pipeline import precompute_plan
from align.pipeline.executor import Inline, Share
from align.pipeline.precompute_plan import open_job
from align.pipeline.task_processes import usable_cores
from support.stub_reference import StubReference

SEEN = len(os.sched_getaffinity(0))


def lay_out(root, files):
    """A system with these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_without_a_group_it_is_what_the_system_lets_the_process_run_on(tmp_path):
    assert usable_cores(tmp_path) == SEEN
    assert usable_cores() <= SEEN


def test_a_process_that_was_bound_to_one_core_uses_one(tmp_path):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/a/b/cpu.max": "100000 100000\n"}, 1),
        ({"sys/fs/cgroup/a/cpu.max": "50000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "100000 100000"}, 1),  # its own group is all that it sees
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000"}, SEEN),
        ({"sys/fs/cgroup/a/b/cpu.max": "99900000 100000"}, SEEN),
        ({"sys/fs/cgroup/a/b/cpu.max": "nonsense"}, SEEN),
        ({"sys/fs/cgroup/a/b/cpu.max": "100000 0"}, SEEN),
    ],
)
def test_a_quota_of_the_second_kind_of_groups_counts(tmp_path, files, cores):
    lay_out(tmp_path, {"proc/self/cgroup": "0::/a/b\n", **files})
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("mount", "quota", "cores"),
    [("cpu", "100000", 1), ("cpu,cpuacct", "100000", 1), ("cpu", "-1", SEEN), ("other", "1", SEEN)],
)
def test_a_quota_of_the_first_kind_of_groups_counts(tmp_path, mount, quota, cores):
    folder = f"sys/fs/cgroup/{mount}/job"
    files = {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    lay_out(tmp_path, {"proc/self/cgroup": "3:memory:/job\n2:cpu,cpuacct:/job\n", **files})
    assert usable_cores(tmp_path) == cores


def test_only_one_function_counts_the_cores_of_the_machine():
    root = Path(usable_cores.__code__.co_filename).parents[1]
    files = [path for room in ("pipeline", "stages") for path in (root / room).rglob("*.py")]
    counting = {path.name for path in files if "cpu_count" in path.read_text()}
    assert counting == {"task_processes.py"}


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_ranks_of_one_machine_share_its_cores_to_prepare(config, monkeypatch, name):
    job = open_job(config, StubReference())
    monkeypatch.setattr(precompute_plan, "usable_cores", lambda: 16)
    monkeypatch.setattr(precompute_plan, "SMALL_INPUT_BYTES", 0)
    counts = []
    for ranks in ("", "8", "32"):
        monkeypatch.setenv(name, ranks)
        counts.append(precompute_plan._of_preparing(job, Inline(Share(1, 2))).processes)
    assert counts == [16, 2, 1]
