"""While a shard is scored, the next one is read and the one before is written."""

import errno
import itertools
import os
import re
import shutil
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from align.pipeline.precompute import scoring
from align.schemas.errors import Interrupted, StorageError, UsageError
from align.stages.pairing.shard_rows import build_shard
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import unfinished_work
from support import disk_faults
from support.patience import PATIENCE
from support.stage_one import contents, run
from support.stub_reference import StubReference


def watched(before):
    """The stub, whose batches, one for each unit, are counted before they are scored."""
    numbers = itertools.count(1)
    return StubReference(scoring=lambda _: before(next(numbers)))


def is_writing():
    return threading.current_thread().name.startswith("align-write")


def test_a_shard_is_scored_while_its_neighbours_are_read_and_written(config, clean, monkeypatch):
    """Each waits for the other: one after the other they would wait for ever."""
    begun, read, build = defaultdict(threading.Event), defaultdict(threading.Event), build_shard
    built, committed = [], []

    def noted(*given, **how):
        built.append(build(*given, **how))
        read[len(built)].set()
        return built[-1]

    monkeypatch.setattr(scoring, "build_shard", noted)

    def before(number):
        begun[number].set()
        assert number > 3 or read[number + 1].wait(PATIENCE)

    def wait_for_next(op):
        if op.name == "link" and op.target.parent.name == "commits":
            assert len(committed) > 2 or begun[len(committed) + 2].wait(PATIENCE)
            committed.append(op.target)

    with disk_faults.watch(wait_for_next):
        made = run(config, watched(before))
    assert len(committed) == len(built) == len(made.manifest.shards) > 4
    assert contents(config.cache.output) == clean


def test_a_shard_that_cannot_be_written_ends_the_run_with_its_error(config, clean):
    scored, failed = [], threading.Event()

    def before(number):
        scored.append(number)
        assert number == 1 or failed.wait(PATIENCE)

    def full(op):
        if is_writing():
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with disk_faults.watch(full), pytest.raises(StorageError):
        run(config, watched(before))
    assert scored == [1, 2]
    assert not [
        one for one in threading.enumerate() if one.name.startswith(("align-read", "align-write"))
    ]
    run(config)
    assert contents(config.cache.output) == clean


def kept_by(stop):
    """How many completions a stopped run says that it keeps."""
    (said,) = re.findall(r"reused [\d,]+ of ([\d,]+)", str(stop))
    return int(said.replace(",", ""))


def test_a_signal_reports_what_is_committed(config, clean):
    def before(number):
        if number == 4:
            raise Interrupted(15)

    with pytest.raises(Interrupted) as stop:
        run(config, watched(before))
    (work,) = unfinished_work(Cache(Path(config.cache.output)))
    commits = work.done()
    assert len(commits) == 3  # the third was being written
    assert kept_by(stop.value) == sum(one.branches for one in commits.values())
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
        (work,) = unfinished_work(Cache(Path(self.output)))
        self.seen.append((here, not here or work.plan.exists()))
        if self.fails:
            raise UsageError("This model cannot be loaded.")
        return super().open()


def test_a_model_is_loaded_onto_a_gpu_while_rows_are_prepared(config):
    """On a CPU it would take the cores that prepare them; with a plan nothing is prepared."""
    of = partial(OnDevice, output=config.cache.output)
    broken, found, later, on_cpu = of(fails=True), of(), of(), of(device="cpu")
    with pytest.raises(UsageError):
        run(config, broken)
    run(config, found)
    shutil.rmtree(config.cache.output)
    run(config, later)
    shutil.rmtree(config.cache.output)
    run(config, on_cpu)
    assert [one.seen[0][0] for one in (broken, found, later, on_cpu)] == [False, True, False, True]
    assert all(prepared for one in (broken, found, later, on_cpu) for _, prepared in one.seen)
    assert [len(one.seen) for one in (broken, found, later, on_cpu)] == [1, 1, 1, 1]


def test_no_model_is_loaded_where_all_scores_are_known(to, tmp_path, caplog):
    """What cannot be read is no reason to wait for the rows, and is told of once."""
    other, (one, two) = to().cache.output, (str(tmp_path / name) for name in ("one", "two"))
    run(to())  # by another reference
    first, again = to(output=one, reuse=[other]), to(output=two, reuse=[one])
    paid, free, beside = (OnDevice(output=folder) for folder in (one, two, two))
    run(first, paid)
    run(again, free)
    assert [here for here, _ in paid.seen] == [False]
    assert not free.seen
    shutil.rmtree(two)
    Cache(Path(one)).manifest_file.write_text("{}")
    run(again, beside)
    assert [here for here, _ in beside.seen] == [False]
    assert len(caplog.records) == 1
