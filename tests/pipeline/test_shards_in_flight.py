"""While a shard is scored, the next one is read and the one before is written."""

import errno
import itertools
import os
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from align.pipeline.precompute import scoring
from align.pipeline.precompute.opening import open_job
from align.pipeline.precompute.precompute import precompute
from align.pipeline.precompute.prepare import Slices
from align.pipeline.precompute.scoring import Shards, ShardScorer
from align.schemas.data_options import DataOptions
from align.schemas.errors import BadDataError, Interrupted, StorageError, UsageError
from align.stages.pairing.shard_rows import build_shard
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import PLAN_NAME, unfinished_work
from support import disk_faults
from support.patience import PATIENCE
from support.stage_one import Silent, contents, run
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


@dataclass
class Shown(Silent):
    """What is shown as scored; a signal comes as one of these is shown."""

    stops: int
    task: str = ""
    rows: list = field(default_factory=list)

    def begin(self, task, **_):
        self.task = task

    def advance(self, done, **_):
        if self.task == "scoring" and done:
            self.rows.append(done)
            if len(self.rows) == self.stops:
                raise Interrupted(15)


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_signal_counts_a_shown_shard_once(to, tmp_path, at):
    """Its scores are known, so its rows are shown when it is committed, all at once."""
    first = to(output=str(tmp_path / "first"))
    made = run(first).manifest
    shown = Shown(stops=1 if at == "first" else len(made.shards))
    config = to(reuse=[first.cache.output])
    with pytest.raises(Interrupted) as stop:
        precompute(config, StubReference(), progress=shown)
    (work,) = unfinished_work(Cache(Path(config.cache.output)))
    commits = work.done()
    assert len(shown.rows) == len(commits)
    assert kept_by(stop.value) == sum(one.branches for one in commits.values())


def test_a_shard_that_is_scored_is_kept_where_nobody_asks_for_more(config):
    def stop(_number):
        raise Interrupted(15)

    with pytest.raises(Interrupted):
        run(config, watched(stop))
    scored = []
    job = open_job(config, watched(scored.append))
    shards = Shards(job.cache.find_plan(), Slices.of(job), job.reference, config)
    numbers = shards.plan.numbers
    shown = ShardScorer(shards, Silent()).score_each(numbers)
    next(shown)
    shown.close()
    assert len(job.cache.done()) == len(scored) < len(numbers)


@dataclass(frozen=True)
class OnDevice(StubReference):
    """The stub, which says what it computes on, and whether rows are prepared when it opens."""

    device: str = "cuda"
    output: str = ""
    seen: list = field(default_factory=list)
    times: list = field(default_factory=list)
    fails: bool = False
    until: Callable = bool  # it is open

    def identity(self):
        return super().identity() | {"model.device": self.device}

    def open(self):
        self.times.append(time.perf_counter())
        here = threading.current_thread() is threading.main_thread()
        (work,) = unfinished_work(Cache(Path(self.output)))
        self.seen.append((here, not here or work.plan.exists()))
        if self.fails:
            raise UsageError("This model cannot be loaded.")
        self.until()
        self.times.append(time.perf_counter())
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


def test_bad_rows_are_reported_while_a_model_loads(config, flawed_file, capfd):
    begun, over = threading.Event(), threading.Event()

    def wait_for_end():
        begun.set()
        assert over.wait(PATIENCE)

    def once_begun(op):
        """No row is found to be bad before the model begins to be loaded."""
        if op.target and op.target.suffix == ".arrow":
            assert begun.wait(PATIENCE)

    def end_first(op):
        if op.target and op.target.name == PLAN_NAME:
            assert len(first.times) == 1  # it is still opening, and the rows did not wait for it
            assert not second.times
            over.set()

    first = OnDevice(output=config.cache.output, until=wait_for_end)
    second = OnDevice(output=config.cache.output)
    flawed = replace(config, data=DataOptions(files=[str(flawed_file)]))
    with disk_faults.watch(once_begun), pytest.raises(BadDataError):
        run(flawed, first)
    assert begun.is_set()
    shutil.rmtree(config.cache.output)
    with disk_faults.watch(end_first):
        run(config, second)
    assert first.times[-1] < second.times[0]
    assert capfd.readouterr() == ("", "")


def test_the_seconds_of_loading_beside_the_rows_are_counted(config):
    planned = threading.Event()

    def plan(op):
        if op.target and op.target.name == PLAN_NAME:
            planned.set()

    reference = OnDevice(output=config.cache.output, until=lambda: planned.wait(PATIENCE))
    with disk_faults.watch(plan):
        made = run(config, reference)
    began, ended = reference.times
    assert made.tally.seconds >= ended - began
