"""One owner, any number of parts: who works on a folder never shows in its bytes."""

import os
import random
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from align.pipeline.executor import Share
from align.pipeline.precompute import precompute
from align.schemas.config import DataOptions
from align.schemas.errors import Interrupted, LockedError
from align.stages.data import input_files
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.failpoints import OF_A_CACHE, OF_A_RING
from support.patience import PATIENCE
from support.stage_one import Gate, Silent, child, contents, run
from support.stub_reference import StubReference
from support.trainings import KILLED

SEED = int(os.environ.get("ALIGN_TEST_SEED", "16"))
FAILPOINTS = [name for name in (*OF_A_RING, *OF_A_CACHE) if name != "quarantine.written"]
ROUNDS = 3  # of killing in one history; then it comes to its end
FEW_AND_MANY = pytest.mark.parametrize("kills", [1, pytest.param(16, marks=pytest.mark.long)])


def joined(*processes):
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes]


def parts(count):
    return [Share(number + 1, count) for number in range(count)]


def test_of_runs_at_once_one_works_and_the_other_is_told_who(config, clean, tmp_path):
    gate = Gate()
    owner = child(config, reference=gate.reference())
    assert gate.reached.wait(PATIENCE)
    assert joined(child(config, stderr=tmp_path / "said")) == [75]
    said = (tmp_path / "said").read_text()
    place = f"process {owner.pid} on {socket.gethostname()}"
    assert f"{config.cache.output} is in use by {place}" in said
    assert "choose another --output" in said
    gate.opened.set()
    assert joined(owner) == [0]
    assert run(config).was_complete  # who comes after the end finds the work done
    assert contents(config.cache.output) == clean


def test_parts_one_after_the_other_in_any_order_end_in_the_same_bytes(config, clean):
    """The number of parts may change; a call without one does what parts that never came left."""
    shares = (parts(4)[1], parts(3)[2], None)
    done = [run(config, share=share) for share in shares]
    assert done[0].tally.units == 2
    assert sum(one.tally.units for one in done) == 8
    assert [one.whole is not None for one in done[:2]] == [False, False]
    assert contents(config.cache.output) == clean


def test_parts_may_start_and_end_in_any_order(config, clean):
    order = (2, 0, 1)
    gates = {number: Gate() for number in order}
    runs = []
    for number in order:
        reference = gates[number].reference()
        runs.append(child(config, share=parts(3)[number], reference=reference))
        assert gates[number].reached.wait(PATIENCE)  # each has begun before the next starts
    for number in reversed(order):
        gates[number].opened.set()
    assert joined(*runs) == [0, 0, 0]
    assert contents(config.cache.output) == clean


def test_a_part_that_still_works_while_another_publishes_ends_well(config, clean):
    gate = Gate()
    late = child(config, share=Share(1, 2), reference=gate.reference())
    assert gate.reached.wait(PATIENCE)  # it is about to score, while a whole call does everything
    assert run(config).manifest.rows == 120
    gate.opened.set()
    assert joined(late) == [0]
    assert contents(config.cache.output) == clean


def test_a_part_beside_other_data_in_its_folder_is_refused_once_that_is_published(
    config, data, tmp_path
):
    lines = data.paired_jsonl.read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:60]))
    few = replace(config, data=DataOptions(files=[str(tmp_path / "few.jsonl")]))
    gate = Gate()
    late = child(config, share=Share(1, 2), reference=gate.reference(), stderr=tmp_path / "said")
    assert gate.reached.wait(PATIENCE)
    run(few)
    gate.opened.set()
    assert joined(late) == [LockedError.exit_code]
    assert "another run, on other data, has completed" in (tmp_path / "said").read_text()
    assert joined(child(config, share=Share(1, 1))) == [0]


@pytest.mark.parametrize(  # as it encodes, pairs
    ("place", "visit"), [("part.before_rename", 1), ("part.after_link", 3)]
)
def test_parts_prepare_together_and_one_killed_at_it_changes_nothing(config, clean, place, visit):
    killed, other = (
        child(config, f"{place}=kill@{visit}", share=Share(1, 2)),
        child(config, share=Share(2, 2)),
    )
    assert joined(other) == [0]
    assert joined(killed)[0] in {0, KILLED}
    assert joined(child(config)) == [0]
    assert contents(config.cache.output) == clean


def test_drafts_of_dead_processes_go(config, clean):
    assert joined(child(config, "part.before_rename=kill")) == [KILLED]
    (work,) = CacheFolder(Path(config.cache.output)).works()
    (dead,) = work.spool.glob("encoded/.*.tmp")
    assert joined(child(config, "plan.before_link=kill")) == [KILLED]
    assert not dead.exists()
    assert joined(child(config)) == [0]
    assert contents(config.cache.output) == clean


def test_children_of_a_run_do_not_keep_its_folder_locked(config):
    gate = Gate()
    owner = child(replace(config, data=replace(config.data, workers=2)), reference=gate.reference())
    assert gate.reached.wait(PATIENCE)
    os.kill(owner.pid, 9)
    assert joined(owner) == [KILLED]
    assert run(config).manifest.rows == 120


class Impatient(Silent):
    """Asks to stop after the second task."""

    calls = 0

    def advance(self, done, *, tokens=0, padding=0):
        self.calls += 1
        if self.calls > 2:
            raise Interrupted(signal.SIGINT)


def test_who_is_interrupted_kills_no_process_of_the_host(config, to, clean, monkeypatch):
    """As in a notebook, which has children of its own."""
    monkeypatch.setattr(input_files, "LEAST_SLICE", 1000)
    monkeypatch.setattr(input_files, "SLICES", 10)
    gate, other = Gate(), to(output=f"{config.cache.output}-2")
    of_host = child(other, reference=gate.reference())
    assert gate.reached.wait(PATIENCE)
    in_children = replace(config, data=replace(config.data, workers=2))
    with pytest.raises(Interrupted):
        precompute(in_children, StubReference(), progress=Impatient())
    gate.opened.set()
    assert joined(of_host) == [0]
    assert contents(other.cache.output) == clean


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
    def begin(number):
        config = to(output=str(tmp_path / f"history-{number}"))
        return config.cache.output, lambda fates: [
            child(config, fate, share=share) for fate, share in zip(fates, parts(3), strict=True)
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
