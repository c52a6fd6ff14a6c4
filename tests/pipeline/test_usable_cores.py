"""How many cores stage 1 takes to prepare data."""

import os

import pytest

from align.pipeline import precompute_plan
from align.pipeline.executor import Inline
from align.pipeline.task_processes import usable_cores
from support.stage_one import run

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


def quota(place, text):
    return {f"sys/fs/cgroup/{place}cpu.max": text}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        (quota("a/b/", "100000 100000\n"), 1),
        (quota("a/", "50000 100000") | quota("a/b/", "max 100000"), 1),
        (quota("", "100000 100000"), 1),  # its own group is all that it sees
        (quota("a/b/", "max 100000"), SEEN),
        (quota("a/b/", "99900000 100000"), SEEN),
        (quota("a/b/", "nonsense"), SEEN),
        (quota("a/b/", "100000 0"), SEEN),
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


def test_ranks_of_one_machine_share_its_cores_to_prepare(to, tmp_path, monkeypatch):
    counts = []

    def alone(share, processes):
        counts.append(processes)
        return Inline(share)

    monkeypatch.setattr(precompute_plan, "Children", alone)
    monkeypatch.setattr(precompute_plan, "usable_cores", lambda: 16)
    monkeypatch.setattr(precompute_plan, "SMALL_INPUT_BYTES", 0)
    for name, ranks in (("NOBODY", "4"), ("LOCAL_WORLD_SIZE", "8"), ("LOCAL_SIZE", "32")):
        with monkeypatch.context() as patch:
            patch.setenv(name, ranks)
            run(to(output=str(tmp_path / ranks)))
    assert counts == [16, 2, 1]
