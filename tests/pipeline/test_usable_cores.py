"""How many cores stage 1 takes to prepare data."""

import os

from align.pipeline import precompute_plan
from align.pipeline.executor import Inline
from align.pipeline.task_processes import usable_cores
from support.stage_one import run

SEEN = len(os.sched_getaffinity(0))


def second_kind(**quotas):
    """A system whose groups give quotas: of the own group `/a/b`, and of those around it."""
    files = {f"sys/fs/cgroup/{place}cpu.max": text for place, text in quotas.items()}
    return {"proc/self/cgroup": "0::/a/b\n", **files}


def first_kind(mount, quota):
    """The same in the older kind of groups."""
    folder = f"sys/fs/cgroup/{mount}/job"
    files = {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    return {"proc/self/cgroup": "3:memory:/job\n2:cpu,cpuacct:/job\n", **files}


def test_a_quota_of_any_group_around_the_process_counts(tmp_path):
    assert usable_cores() <= usable_cores(tmp_path) == SEEN
    for number, (files, cores) in enumerate(
        (
            (second_kind(**{"a/b/": "100000 100000\n"}), 1),
            (second_kind(**{"a/": "50000 100000", "a/b/": "max 100000"}), 1),
            (second_kind(**{"": "100000 100000"}), 1),  # its own group is all that it sees
            (second_kind(**{"a/b/": "max 100000"}), SEEN),
            (second_kind(**{"a/b/": "99900000 100000"}), SEEN),
            (second_kind(**{"a/b/": "nonsense"}), SEEN),
            (second_kind(**{"a/b/": "100000 0"}), SEEN),
            (first_kind("cpu", "100000"), 1),
            (first_kind("cpu,cpuacct", "100000"), 1),
            (first_kind("cpu", "-1"), SEEN),
            (first_kind("other", "1"), SEEN),
        )
    ):
        for name, text in files.items():
            (tmp_path / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(number) / name).write_text(text)
        assert usable_cores(tmp_path / str(number)) == cores, files


def test_a_process_that_was_bound_to_one_core_uses_one(tmp_path):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)


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
