"""While a unit is scored, the next one is read and the one before is written."""

import errno
import itertools
import os
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from align.pipeline.precompute import scoring_worker
from align.schemas.errors import Interrupted, StorageError, UsageError
from align.stages.pairing.units import build_unit
from align.stages.storage.cache.cache_folder import CacheFolder
from align.stages.storage.cache.commits import read_commits
from align.stages.storage.disk import failpoints
from support.patience import PATIENCE
from support.stage_one import contents, run
from support.stub_reference import StubReference, StubScorer


@dataclass(frozen=True)
class Watched(StubReference):
    """The stub, whose batches, one for each unit, are counted before they are scored."""

    before: Callable = print

    def open(self):
        return WatchedScorer(super().open().salt, before=self.before, numbers=itertools.count(1))


@dataclass(frozen=True)
class WatchedScorer(StubScorer):
    before: Callable = print
    numbers: itertools.count = None

    def score(self, trees):
        self.before(next(self.numbers))
        return super().score(trees)


def is_writing():
    return threading.current_thread().name.startswith("align-write")


def test_a_unit_is_scored_while_its_neighbours_are_read_and_written(config, clean, monkeypatch):
    """Each waits for the other: one after the other they would wait for ever."""
    begun, read, build = defaultdict(threading.Event), defaultdict(threading.Event), build_unit
    built, committed = [], []

    def noted(*given):
        built.append(build(*given))
        read[len(built)].set()
        return built[-1]

    monkeypatch.setattr(scoring_worker, "build_unit", noted)

    def before(number):
        begun[number].set()
        assert number > 3 or read[number + 1].wait(PATIENCE)

    def wait_for_next(op):
        if op.name == "link" and op.target.parent.name == "commits":
            assert len(committed) > 2 or begun[len(committed) + 2].wait(PATIENCE)
            committed.append(op.target)

    with failpoints.watch(wait_for_next):
        made = run(config, Watched(before=before))
    assert len(committed) == len(built) == len(made.manifest.shards) > 4
    assert contents(config.cache.output) == clean


def test_a_unit_that_cannot_be_written_ends_the_run_with_its_error(config, clean):
    scored, failed = [], threading.Event()

    def before(number):
        scored.append(number)
        assert number == 1 or failed.wait(PATIENCE)

    def full(op):
        if is_writing():
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with failpoints.watch(full), pytest.raises(StorageError, match="No space left"):
        run(config, Watched(before=before))
    assert scored == [1, 2]
    assert not [
        one for one in threading.enumerate() if one.name.startswith(("align-read", "align-write"))
    ]
    run(config)
    assert contents(config.cache.output) == clean


def test_what_is_said_to_be_kept_when_a_signal_comes_is_what_is_committed(config, clean):
    def before(number):
        if number == 4:
            raise Interrupted(15)

    with pytest.raises(Interrupted) as stop:
        run(config, Watched(before=before))
    (work,) = CacheFolder(Path(config.cache.output)).works()
    commits = read_commits(work, 99)
    assert len(commits) == 3  # the third was being written
    (said,) = re.findall(r"reused [\d,]+ of ([\d,]+)", str(stop.value))
    assert int(said.replace(",", "")) == sum(one.branches for one in commits.values())
    run(config)
    assert contents(config.cache.output) == clean


@dataclass(frozen=True)
class OnDevice(StubReference):
    """The stub, which says what it computes on, and whether rows are prepared when it opens."""

    device: str = "cuda"
    output: str = ""
    seen: list = field(default_factory=list)
    fails: bool = False

    def identity(self):
        return super().identity() | {"model.device": self.device}

    def open(self):
        here = threading.current_thread() is threading.main_thread()
        (work,) = CacheFolder(Path(self.output)).works()
        self.seen.append((here, not here or work.plan.exists()))
        if self.fails:
            raise UsageError("This model cannot be loaded.")
        return super().open()


def test_a_model_is_loaded_onto_a_gpu_while_rows_are_prepared(config):
    """On a CPU it would take the cores that prepare them; with a plan nothing is prepared."""
    of = partial(OnDevice, output=config.cache.output)
    broken, found, later, on_cpu = of(fails=True), of(), of(), of(device="cpu")
    with pytest.raises(UsageError, match="cannot be loaded"):
        run(config, broken)
    run(config, found)
    shutil.rmtree(config.cache.output)
    run(config, later)
    shutil.rmtree(config.cache.output)
    run(config, on_cpu)
    assert [one.seen[0][0] for one in (broken, found, later, on_cpu)] == [False, True, False, True]
    assert all(prepared for one in (broken, found, later, on_cpu) for _, prepared in one.seen)
    assert [len(one.seen) for one in (broken, found, later, on_cpu)] == [1, 1, 1, 1]
