"""Killed at any named moment, or on a full disk, the same command ends in the same bytes."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from align.schemas.errors import StorageError, UsageError
from align.stages.storage.cache import Cache
from align.stages.storage.disk import fs
from support import disk_faults
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
