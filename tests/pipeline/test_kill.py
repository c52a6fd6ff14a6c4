"""Killed at any named moment, or on a full disk, the same command ends in the same bytes."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from align.schemas.errors import CorruptionError, StorageError, UsageError
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
def test_no_bit_that_flips_between_two_runs_reaches_a_cache(
    config, clean, tmp_path, place, files, is_told
):
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
