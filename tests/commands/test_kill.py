"""Stage 1 that is killed, stopped or out of room: what is kept, and the same bytes in the end."""

import errno
import itertools
import os
import re
import shutil
import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from align.pipeline.precompute import scoring
from align.schemas.errors import CorruptionError, Interrupted, StorageError, UsageError
from align.stages.pairing.shard_rows import build_shard
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import unfinished_work
from align.stages.storage.disk import fs
from support import disk_faults
from support.flips import flip_bits
from support.patience import PATIENCE
from support.refusals import refuses
from support.stage_one import child, contents, run
from support.stub_reference import StubReference

EXIT_CODES = {"kill": -9, "eio": 74, "enospc": 74, "term": 143}


@pytest.mark.parametrize(
    "places",
    [
        dict.fromkeys(disk_faults.OF_STAGE_ONE, "kill"),
        {
            "before:rename:encoded/*.json": "eio",
            "before:link:plan.json": "term",
            "before:fsync:tmp/*.parquet": "enospc",
            "before:rename:data/*.parquet": "enospc",
            "before:link:commits/*.json": "enospc",
            "after:fsync_folder:commits": "eio",
            "after:remove_tree:.trash-*": "kill",
        },
    ],
    ids=["killed", "stopped"],
)
def test_a_run_stopped_at_every_named_place_ends_in_the_same_bytes(flawed, clean_of_flawed, places):
    """At one after the other: each goes on from what the one before has left."""
    folder = Cache(Path(flawed.cache.output))
    for name, action in places.items():
        stopped = child(flawed, f"{name}={action}")
        stopped.join(PATIENCE)
        assert stopped.exitcode == EXIT_CODES[action], name
        if not folder.manifest_file.exists():
            with refuses(UsageError, folder.root):
                folder.manifest()
    run(flawed)
    assert contents(folder.root) == clean_of_flawed


@pytest.mark.parametrize(
    ("place", "files", "is_told"),
    [
        ("before:link:plan.json", "encoded/*.json", False),  # these rows are encoded again
        ("after:fsync_folder:commits", "plan.json", True),
        ("after:fsync_folder:commits", "commits/*.json", True),
    ],
)
def test_no_flipped_bit_reaches_a_cache(config, clean, tmp_path, place, files, is_told):
    """A file that is named as damaged is removed, and the command given again."""
    child(config, f"{place}=kill").join(PATIENCE)
    (work,) = unfinished_work(Cache(Path(config.cache.output)))
    (path,) = work.work.glob(files)
    for _ in flip_bits(path, 3):
        output = shutil.copytree(config.cache.output, tmp_path / "flipped")
        damaged = output / path.relative_to(config.cache.output)
        again = replace(config, cache=replace(config.cache, output=str(output)))
        if is_told:
            with refuses(CorruptionError, damaged):
                run(again)
            damaged.unlink()
        run(again)
        assert contents(output) == clean
        shutil.rmtree(output)


def test_a_disk_without_room_is_refused_before_scoring(config, tmp_path, monkeypatch):
    manifest = run(config).manifest
    # Four bytes for each id, and as many for each log-prob; the prompts' come on top.
    least = 2 * 4 * manifest.tokens
    elsewhere = replace(config, cache=replace(config.cache, output=str(tmp_path / "elsewhere")))
    monkeypatch.setattr(fs, "free_bytes", lambda *_: least)
    with refuses(StorageError, "elsewhere") as told:
        run(elsewhere, StubReference(opening=partial(pytest.fail, "the model is loaded")))
    assert told.value.exit_code == 74
    monkeypatch.setattr(fs, "free_bytes", lambda *_: 4 * least)
    assert run(elsewhere).manifest == manifest


def watched(before):
    """The stub, whose batches, one for each unit, are counted before they are scored."""
    numbers = itertools.count(1)
    return StubReference(scoring=lambda _: before(next(numbers)))


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
        if threading.current_thread().name.startswith("align-write"):
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


def test_a_signal_reports_what_is_committed(config, clean):
    def before(number):
        if number == 4:
            raise Interrupted(15)

    with pytest.raises(Interrupted) as stop:
        run(config, watched(before))
    (work,) = unfinished_work(Cache(Path(config.cache.output)))
    commits = work.done()
    assert len(commits) == 3  # the third was being written
    (kept,) = re.findall(r"reused [\d,]+ of ([\d,]+)", str(stop.value))
    assert int(kept.replace(",", "")) == sum(one.branches for one in commits.values())
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
