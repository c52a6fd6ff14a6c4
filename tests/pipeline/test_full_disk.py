"""A disk that is really full: refused in words, nothing half taken for whole, resumed with room."""

import errno
import json
import os
import re
import subprocess
from functools import partial

import pytest

from align.schemas.errors import StorageError
from align.schemas.json_codec import to_json
from align.stages.storage import failpoints
from support.programs import TESTS, may_mount, program
from support.stage_one import contents, run


@pytest.fixture
def wide(to):
    """Its shards need more than is given back before their room is looked at: the merged runs."""
    return partial(to, kl_pairs=3)


@pytest.fixture
def told(wide, tmp_path):
    """What small_disk.py has to tell, as root of a mount namespace of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    config = to_json(wide(output=str(disk / "cache")))
    done = subprocess.run(
        ["unshare", "-Urm", *program("small_disk", config, disk)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not may_mount(), reason="needs user namespaces")
def test_a_disk_that_is_full_is_refused_in_words_and_resumed_with_room(told, wide, tmp_path):
    run(wide(output=str(tmp_path / "whole")))
    too_small, filled = told["too small"], told["filled"]
    assert len(too_small) > 3
    assert all("disk/cache" in said for said in [*too_small, filled])
    draft = r"/\.00000000\.arrows\.[0-9a-f]{16}\.tmp: write failed: No space left on device \("
    assert re.search(draft, too_small[0])
    assert "the shards may need" in too_small[-1]  # before the first hour, not after the last
    assert ".parquet: write failed: No space left on device (" in filled
    assert "bytes needed" in filled
    assert "then run the same command again: finished shards are kept" in filled
    assert told["committed when filled"] == 2
    assert told["contents"] == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["write", "fsync", "rename", "link", "create"])
def test_the_first_refusal_of_any_kind_stops_the_run_and_loses_nothing(
    config, clean, tmp_path, name
):
    seen = []

    def full(op):
        if op.name == name and op.path.is_relative_to(tmp_path / "cache" / "_align"):
            seen.append(op.path)
            if len(seen) == 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with failpoints.watch(full), pytest.raises(StorageError, match="No space left.* free") as told:
        run(config)
    assert told.value.exit_code == 74
    assert {*seen[3:]} == {seen[3]}  # a file may be closed, and nothing else was tried
    run(config)
    assert contents(tmp_path / "cache") == clean
