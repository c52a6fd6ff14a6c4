"""Killed at any moment, the same command ends in the same bytes."""

import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from align.schemas.errors import UsageError
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.failpoints import OF_A_CACHE, OF_A_RING
from align.stages.storage.manifest_file import load_manifest
from support.patience import PATIENCE
from support.stage_one import child, contents

SEED = int(os.environ.get("ALIGN_TEST_SEED", "20"))


def ends_like(clean, config):
    """A plain rerun succeeds and leaves exactly what an uninterrupted run leaves."""
    again = child(config)
    again.join(PATIENCE)
    assert again.exitcode == 0
    assert contents(config.cache.output) == clean


EXIT_CODES = {"kill": -9, "eio": 74, "term": 143}
# The other places are stopped in these two ways too by storage/test_failpoints.
STOPPED = [
    *(("kill", name) for name in (*OF_A_RING, *OF_A_CACHE)),
    *((action, name) for action in ("eio", "term") for name in (*OF_A_RING, "commit.after_link")),
]


@pytest.mark.parametrize(("action", "name"), STOPPED)
def test_a_run_stopped_at_any_named_place_ends_in_the_same_bytes(
    flawed, clean_of_flawed, action, name
):
    visit = 3 if name.split(".")[0] in {"unit", "shard", "commit"} else 1
    stopped = child(flawed, f"{name}={action}@{visit}")
    stopped.join(PATIENCE)
    assert stopped.exitcode == EXIT_CODES[action]
    ends_like(clean_of_flawed, flawed)


@pytest.mark.parametrize("histories", [8, pytest.param(200, marks=pytest.mark.long)])
def test_runs_killed_at_random_moments_end_in_the_same_bytes(config, clean, tmp_path, histories):
    """Kills again and again, at moments spread over a whole run, until one run survives."""
    random_moments = random.Random(SEED)
    print(f"ALIGN_TEST_SEED={SEED}")
    whole = child(replace(config, cache=replace(config.cache, output=str(tmp_path / "whole"))))
    started = time.perf_counter()
    whole.join(PATIENCE)
    span = time.perf_counter() - started
    kills = 0
    for history in range(histories):
        output = str(tmp_path / f"history-{history}")
        victim_config = replace(config, cache=replace(config.cache, output=output))
        before = kills
        while True:
            victim = child(victim_config)
            started = time.perf_counter()
            # However slow the machine has become, one run comes to its end.
            is_last = kills - before == 50
            victim.join(PATIENCE if is_last else random_moments.uniform(0, 1.2 * span))
            if victim.exitcode is not None:
                break
            victim.kill()
            victim.join()
            kills += 1
        if kills == before:
            span = time.perf_counter() - started  # the first run may have been a slow one
        assert victim.exitcode == 0
        assert contents(output) == clean
    print(f"{kills} kills in {histories} histories")
    assert kills >= histories // 2


def test_a_reader_never_takes_a_half_written_cache_for_whole(config):
    stopped = child(config, "commit.done=kill@4")
    stopped.join(PATIENCE)
    assert stopped.exitcode == -9
    folder = CacheFolder(Path(config.cache.output))
    assert list(folder.data.iterdir())
    with pytest.raises(UsageError, match="not a finished cache"):
        load_manifest(folder)
