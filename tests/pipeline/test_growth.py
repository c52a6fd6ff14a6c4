"""A cache that grows in place stays whole for those who read what it was before."""

import json
import shutil
from dataclasses import replace

import pytest

from align.schemas.config import DataOptions
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.manifest_file import load_manifest
from support.command import align, refusal
from support.patience import PATIENCE
from support.stage_one import child, contents, run
from support.trainings import KILLED, learned, weights


@pytest.fixture
def grow(config, data, tmp_path):
    """The command that makes a cache of the first rows of the data, then of more of them."""
    lines = data.paired_jsonl.read_text().splitlines(keepends=True)

    def prepare(rows, output="cache"):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(lines[:rows]))
        cache = replace(config.cache, output=str(tmp_path / output))
        return replace(config, data=DataOptions(files=[str(path)]), cache=cache)

    return prepare


# All places of a first cache are in test_kill.
@pytest.mark.parametrize("name", ["root.after_link", "manifest.before_rename", "gc.forgotten"])
def test_growing_that_is_killed_ends_in_the_same_bytes(grow, tmp_path, name):
    for rows in (80, 120):
        run(grow(rows, "clean"))
    run(grow(80))
    stopped = child(grow(120), f"{name}=kill")
    stopped.join(PATIENCE)
    assert stopped.exitcode == KILLED
    run(grow(120))
    assert contents(tmp_path / "cache") == contents(tmp_path / "clean")


def test_what_a_cache_was_is_named_and_goes_when_it_is_told_to(grow, tmp_path):
    run(grow(80))
    cache = tmp_path / "cache"
    before = load_manifest(CacheFolder(cache))
    said = run(grow(120)).text()
    kept = contents(cache)
    assert "kept for trainings that began on 1 earlier root:" in said
    assert "1 earlier root" in align("verify", cache, "--rescore", 0).out
    assert json.loads(align("inspect", cache, "--json").out)["superseded_files"] > 0
    assert "align gc" in align("inspect", cache).out
    dry = align("gc", cache, "--dry-run")
    assert (dry.code, before.root in dry.out) == (0, True)
    assert "Pass --yes" in refusal(2, "gc", cache)
    assert contents(cache) == kept
    assert align("gc", cache, "--yes").out.endswith("removed\n")
    named = {shard.file for shard in load_manifest(CacheFolder(cache)).shards}
    assert {path.name for path in (cache / "data").iterdir()} == named
    assert "0 files" in align("gc", cache).out


def test_unfinished_work_keeps_everything(grow, tmp_path):
    for rows in (60, 80):
        run(grow(rows))
    child(grow(120), "commit.done=kill@2").join(PATIENCE)
    kept = contents(tmp_path / "cache")
    assert "is an unfinished run" in refusal(2, "gc", tmp_path / "cache", "--yes")
    assert contents(tmp_path / "cache") == kept


def test_a_training_continues_with_the_cache_it_began_on(course, world, tmp_path):
    cache, output = shutil.copytree(course.cache, tmp_path / "cache"), tmp_path / "run"
    more = ("--cache", cache)
    (answer,) = course.start(output, *more, failpoints=["step.started=kill@6"]).answers()
    assert answer.code == KILLED
    grown = course.server.run(
        *("precompute-ref", world.data.paired, "--model", course.model, "--output", cache),
        *("--rows-per-shard", 16, "--kl-pairs", 2, "--no-mlflow"),
    )
    assert grown.code == 0, grown
    assert "kept for trainings that began on" in grown.out
    resumed = course.run(output, *more, "--resume", "auto")
    assert "continuing after step 4" in resumed.err
    whole = course.whole()
    assert weights(output) == weights(whole)
    assert learned(output) == learned(whole)
