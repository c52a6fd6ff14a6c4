"""How many cores stage 1 takes to prepare data."""

import os

from align.pipeline.workers import usable_cores

SEEN = len(os.sched_getaffinity(0))


# Files below the root of a system, and the cores that they leave; 0 of them where all are left.
QUOTAS = [
    ({"a/b/": "100000 100000\n"}, 1),
    ({"a/": "50000 100000", "a/b/": "max 100000"}, 1),
    ({"": "100000 100000"}, 1),  # its own group is all that it sees
    ({"a/b/": "max 100000"}, 0),
    ({"a/b/": "99900000 100000"}, 0),
    ({"a/b/": "nonsense"}, 0),
    ({"a/b/": "100000 0"}, 0),
]


def test_a_quota_of_any_group_around_the_process_counts(tmp_path):
    systems = []
    for quotas, cores in QUOTAS:
        files = {f"sys/fs/cgroup/{place}cpu.max": text for place, text in quotas.items()}
        systems.append(({"proc/self/cgroup": "0::/a/b\n", **files}, cores))
    assert usable_cores() <= usable_cores(tmp_path) == SEEN
    for number, (files, cores) in enumerate(systems):
        for name, text in files.items():
            (tmp_path / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(number) / name).write_text(text)
        assert usable_cores(tmp_path / str(number)) == (cores or SEEN), files
