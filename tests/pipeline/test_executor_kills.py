"""Killed at random moments and at named places, again and again, under every executor."""

import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from align.pipeline.executor import Share
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.failpoints import OF_A_CACHE, OF_A_RING
from support.patience import PATIENCE
from support.ray_cluster import LOOPBACK, ray_cluster
from support.stage_one import child, contents, run
from support.stub_reference import SlowReference
from support.trainings import KILLED

SEED = int(os.environ.get("ALIGN_TEST_SEED", "16"))
FAILPOINTS = [name for name in (*OF_A_RING, *OF_A_CACHE) if name != "quarantine.written"]
ROUNDS = 5  # of killing in one history; then it comes to its end
FEW_AND_MANY = [1, pytest.param(16, marks=pytest.mark.long)]


@dataclass
class Campaign:
    """Kills processes until there were enough kills, and compares what every history leaves."""

    draw: random.Random = field(default_factory=lambda: random.Random(SEED))
    at_random: int = 0
    at_failpoints: int = 0
    histories: int = 0

    @property
    def kills(self):
        return self.at_random + self.at_failpoints

    def fates(self, count):
        """For each process a failpoint to die at, or none."""
        return [self._fate() if self.draw.random() < 0.5 else "" for _ in range(count)]

    def _fate(self):
        return f"{self.draw.choice(FAILPOINTS)}=kill"

    def strike(self, processes, fates, span):
        """Lets processes meet their fates; those that have none are killed at some moment."""
        last = time.monotonic() + self.draw.uniform(0, span)
        for process, fate in zip(processes, fates, strict=True):
            if not fate:
                process.join(max(0, last - time.monotonic()))
                self.at_random += process.exitcode is None
                process.kill()
            process.join(PATIENCE)
            assert process.exitcode in {0, KILLED}, fate
            self.at_failpoints += bool(fate) and process.exitcode == KILLED

    def run_to(self, least, history):
        """Begins histories until there were so many kills."""
        while self.kills < least:
            self.histories += 1
            history(self.histories)
        print(
            f"ALIGN_TEST_SEED={SEED}: {self.kills} kills in {self.histories} histories, "
            f"{self.at_random} at random moments and {self.at_failpoints} at failpoints"
        )


def finish(output, start):
    """Starts processes once more, which nobody kills."""
    processes = start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    assert CacheFolder(Path(output)).manifest.exists()


@pytest.mark.parametrize("kills", FEW_AND_MANY)
@pytest.mark.parametrize("count", [pytest.param(0, marks=pytest.mark.long), 3])
def test_one_process_or_three_parts_end_in_the_same_bytes(to, clean, tmp_path, kills, count):
    campaign = Campaign()
    shares = [Share(part + 1, count) for part in range(count)] or [None]
    unharmed = [""] * len(shares)

    def history(number):
        config = to(output=str(tmp_path / f"history-{number}"))

        def start(fates=unharmed):
            return [
                child(config, fate, share=share) for fate, share in zip(fates, shares, strict=True)
            ]

        for _ in range(ROUNDS):
            fates = campaign.fates(len(shares))
            campaign.strike(start(fates), fates, span=0.8)
        finish(config.cache.output, start)
        run(config)  # which removes what a publisher that was killed has left
        assert contents(config.cache.output) == clean

    campaign.run_to(kills, history)


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


@pytest.mark.parametrize("kills", FEW_AND_MANY)
def test_two_ranks_end_in_the_same_bytes(course, world, tmp_path, kills):
    campaign = Campaign()
    words = ("precompute-ref", world.data.paired, "--model", course.model, "--no-mlflow")
    words += ("--rows-per-shard", 8, "--set", "cache.reuse_known=false")
    assert course.server.run(*words, "--output", tmp_path / "clean").code == 0

    def history(number):
        output = tmp_path / f"history-{number}"

        def start(fates=("", "")):
            ranks = course.server.start(*words, "--output", output, ranks=2, failpoints=fates)
            return [Rank(process) for process in ranks.processes]

        for _ in range(ROUNDS):
            fates = campaign.fates(2)
            campaign.strike(start(fates), fates, span=5)
        finish(output, start)
        assert course.server.run(*words, "--output", output).code == 0
        assert contents(output) == contents(tmp_path / "clean")

    campaign.run_to(kills, history)


@pytest.fixture(scope="module")
def cluster_to_strike():
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, ray_cluster(Path(folder)) as one:
        yield one


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_actors_and_their_driver_end_in_the_same_bytes(to, clean, tmp_path, cluster_to_strike):
    campaign, address = Campaign(), cluster_to_strike.address

    def history(number):
        config = to(output=str(tmp_path / f"history-{number}"))
        options = {"executor": "ray", "ray_address": address, "ray_workers": "2"}
        config = replace(config, scoring=replace(config.scoring, **options))
        for victim in ("actors", "driver", "actors"):
            driver = child(config, reference=SlowReference(), environment=LOOPBACK)
            until = time.monotonic() + campaign.draw.uniform(4, 10)
            while victim == "actors" and driver.exitcode is None and time.monotonic() < until:
                driver.join(campaign.draw.uniform(1, 3))
                for actor in cluster_to_strike.actors()[:1]:
                    actor.kill()
                    campaign.at_random += 1
            driver.join(max(0, until - time.monotonic()))
            if victim == "driver" and driver.exitcode is None:
                driver.kill()
                campaign.at_random += 1
            driver.join(PATIENCE)
            assert driver.exitcode in {0, KILLED}
        finish(
            config.cache.output,
            lambda: [child(config, reference=SlowReference(), environment=LOOPBACK)],
        )
        assert contents(config.cache.output) == clean

    campaign.run_to(16, history)
