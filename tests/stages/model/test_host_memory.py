"""How much of a machine's memory a process may use: the tightest limit around it."""

import os

import pytest

from align.stages.model.loading.placement import host_bytes

WHOLE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
LESS, LEAST, MORE = (WHOLE // 2, WHOLE // 4, 4 * WHOLE)
JOB = "system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
NONE = (1 << 63) - 4096  # of version 1


@pytest.mark.parametrize(
    ("groups", "limits", "allowed"),
    [
        (None, {}, WHOLE),
        ("0::/", {"memory.max": LESS}, LESS),
        ("0::/", {"memory.max": "max"}, WHOLE),
        ("0::/a/b", {"a/b/memory.max": LESS, "a/memory.max": LEAST}, LEAST),
        ("0::/a/b", {"a/b/memory.max": "max", "memory.max": LESS}, LESS),
        ("0::/a", {"a/memory.max": MORE, "b/memory.max": LEAST}, WHOLE),
        (f"0::/{JOB}", {f"{JOB[: JOB.index('/step')]}/memory.max": LESS}, LESS),
        ("4:cpu,memory:/slurm/job_7", {"memory/slurm/job_7/memory.limit_in_bytes": LESS}, LESS),
        ("4:memory:/docker/5", {"memory/memory.limit_in_bytes": LESS}, LESS),
        ("4:memory:/", {"memory/memory.limit_in_bytes": NONE}, WHOLE),
        ("4:cpu:/a\n0::/a", {"unified/a/memory.max": LESS, "memory/a/memory.max": 1}, LESS),
        ("0::/../../a:b", {"memory.max": LESS, "a:b/memory.max": LEAST}, LESS),
    ],
)
def test_the_smallest_limit_of_all_groups_around_a_process_counts(
    tmp_path, groups, limits, allowed
):
    files = {f"sys/fs/cgroup/{name}": f"{limit}\n" for name, limit in limits.items()}
    for name, text in files.items() | ({"proc/self/cgroup": groups}.items() if groups else ()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_bytes(tmp_path) == allowed


def test_this_process_may_use_some_of_its_machine():
    assert 0 < host_bytes() <= WHOLE
