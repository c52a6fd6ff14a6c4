"""Killed at random moments and at named places, again and again, by parts and by ranks."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from align.pipeline.executor import Share
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.failpoints import OF_A_CACHE, OF_A_RING
from support.patience import PATIENCE
from support.stage_one import child, contents, run
from support.trainings import KILLED

SEED = int(os.environ.get("ALIGN_TEST_SEED", "16"))
FAILPOINTS = [name for name in (*OF_A_RING, *OF_A_CACHE) if name != "quarantine.written"]
ROUNDS = 5  # of killing in one history; then it comes to its end
FEW_AND_MANY = pytest.mark.parametrize("kills", [1, pytest.param(16, marks=pytest.mark.long)])


def strike(draw, start, count, span):
    """Starts processes: some die at a failpoint, the others are killed at some moment, or end."""
    fates = [f"{draw.choice(FAILPOINTS)}=kill" if draw.random() < 0.5 else "" for _ in range(count)]
    last, killed = time.monotonic() + draw.uniform(0, span), 0
    for process, fate in zip(start(fates), fates, strict=True):
        if not fate:
            process.join(max(0, last - time.monotonic()))
            process.kill()
        process.join(PATIENCE)
        assert process.exitcode in {0, KILLED}, fate
        killed += process.exitcode == KILLED
    return killed


def histories(least, begin, count, span):
    """Folders whose processes were killed again and again, and then went on to the end."""
    draw, kills, number = random.Random(SEED), 0, 0
    while kills < least:
        number += 1
        output, start = begin(number)
        kills += sum(strike(draw, start, count, span) for _ in range(ROUNDS))
        last = start([""] * count)
        for process in last:
            process.join(PATIENCE)
        assert [process.exitcode for process in last] == [0] * count
        assert CacheFolder(Path(output)).manifest.exists()
        yield output
    print(f"ALIGN_TEST_SEED={SEED}: {kills} kills in {number} histories")


@FEW_AND_MANY
def test_three_parts_end_in_the_same_bytes(to, clean, tmp_path, kills):
    shares = [Share(part, 3) for part in (1, 2, 3)]

    def begin(number):
        config = to(output=str(tmp_path / f"history-{number}"))
        return config.cache.output, lambda fates: [
            child(config, fate, share=share) for fate, share in zip(fates, shares, strict=True)
        ]

    for output in histories(kills, begin, 3, span=0.8):
        run(to(output=output))  # which removes what a publisher that was killed has left
        assert contents(output) == clean


class Rank:
    """A rank of a server, as a process of multiprocessing is used."""

    def __init__(self, process):
        self._process, self.exitcode = process, None

    def join(self, seconds):
        if self.exitcode is None:
            self.exitcode = self._process.server.wait(self._process.pid, seconds)

    def kill(self):
        if self.exitcode is None:
            os.kill(self._process.pid, signal.SIGKILL)


@FEW_AND_MANY
def test_two_ranks_end_in_the_same_bytes(course, world, tmp_path, kills):
    words = ("precompute-ref", world.data.paired, "--model", course.model, "--no-mlflow")
    words += ("--rows-per-shard", 8, "--set", "cache.reuse_known=false", "--output")
    assert course.server.run(*words, tmp_path / "clean").code == 0

    def begin(number):
        output = tmp_path / f"history-{number}"

        def start(fates):
            ranks = course.server.start(*words, output, ranks=2, failpoints=fates)
            return [Rank(process) for process in ranks.processes]

        return output, start

    for output in histories(kills, begin, 2, span=5):
        assert course.server.run(*words, output).code == 0
        assert contents(output) == contents(tmp_path / "clean")
