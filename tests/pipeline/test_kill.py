"""Killed at any moment, on a disk that fails or lies, the same command ends in the same bytes."""

import errno
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from align.schemas.errors import AlignError, StorageError, UsageError
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import unfinished_work
from align.stages.storage.disk import fs
from support import disk_faults
from support.flips import flips
from support.patience import PATIENCE
from support.refusals import refuses
from support.stage_one import child, contents, run
from support.stub_reference import StubReference

EXIT_CODES = {"kill": -9, "eio": 74, "term": 143}


@pytest.mark.parametrize(
    "places",
    [
        dict.fromkeys(disk_faults.OF_STAGE_ONE, "kill"),
        {
            "before:rename:encoded/*.json": "eio",
            "before:link:plan.json": "term",
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


@pytest.mark.parametrize("name", ["fsync", "rename", "link"])
def test_the_first_refusal_of_a_disk_stops_the_run_and_loses_nothing(config, clean, tmp_path, name):
    seen = []

    def full(op):
        if op.name == name and op.path.is_relative_to(tmp_path / "cache" / "_align"):
            seen.append(op.path)
            if len(seen) == 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with disk_faults.watch(full), refuses(StorageError, tmp_path / "cache") as told:
        run(config)
    assert told.value.exit_code == 74
    assert str(seen[3]) in str(told.value)
    assert len(seen) == 4  # nothing else was tried
    run(config)
    assert contents(tmp_path / "cache") == clean


class Unopened(StubReference):
    def open(self):
        pytest.fail("it scores")


def test_a_disk_without_room_for_the_shards_is_refused_before_anything_is_scored(
    config, tmp_path, monkeypatch
):
    manifest = run(config).manifest
    # Four bytes for each id, and as many for each log-prob; the prompts' come on top.
    least = 2 * 4 * manifest.tokens
    elsewhere = replace(config, cache=replace(config.cache, output=str(tmp_path / "elsewhere")))
    monkeypatch.setattr(fs, "free_bytes", lambda *_: least)
    with refuses(StorageError, "elsewhere") as told:
        run(elsewhere, Unopened())
    assert told.value.exit_code == 74
    monkeypatch.setattr(fs, "free_bytes", lambda *_: 4 * least)
    assert run(elsewhere).manifest == manifest


@pytest.mark.parametrize("count", [10, pytest.param(960, marks=pytest.mark.long)])
def test_no_bit_that_flips_between_two_runs_reaches_a_cache(config, clean, tmp_path, count):
    """Each is found, and mended by what the message says, or changes nothing."""
    child(config, "after:fsync_folder:commits=kill@2").join(PATIENCE)
    (work,) = unfinished_work(Cache(Path(config.cache.output)))
    files = [*work.work.rglob("*.json")]  # tokens that wait have no digest
    found = 0
    for path, byte, bit in flips({path: path.stat().st_size for path in files}, count):
        output = shutil.copytree(config.cache.output, tmp_path / "flipped")
        damaged = output / path.relative_to(config.cache.output)
        held = bytearray(damaged.read_bytes())
        held[byte] ^= 1 << bit
        damaged.write_bytes(held)
        again = replace(config, cache=replace(config.cache, output=str(output)))
        try:
            run(again)
        except AlignError as error:
            found += 1
            mend(error, output)
            run(again)
        assert contents(output) == clean
        shutil.rmtree(output)
    assert found > count // 2


def mend(error, output):
    """Does what the message says: a damaged file of ours is named, to be removed."""
    assert error.exit_code == 5, error
    (name,) = re.findall(r"^(/\S+) is damaged", str(error))
    assert Path(name).is_relative_to(output / "_align")
    Path(name).unlink()
