"""A cache that grows in place stays whole for those who read what it was before."""

import json
import shutil
from dataclasses import replace

import pytest

from align.pipeline.executors.executor import Share
from align.schemas.data_options import DataOptions
from align.schemas.errors import FingerprintError, LockedError
from align.stages.storage.bucket.objects import location
from align.stages.storage.cache.cache_folder import CacheFolder
from align.stages.storage.cache.manifest_file import load_manifest
from support.command import align, refusal
from support.patience import PATIENCE
from support.stage_one import child, contents, run
from support.stub_reference import StubReference
from support.trainings import KILLED, require_same


@pytest.fixture
def rows_of(to, data, tmp_path):
    """The command that makes a cache of these rows of the data."""
    lines = data.paired_jsonl.read_text().splitlines(keepends=True)

    def prepare(*rows, output=tmp_path / "cache"):
        path = tmp_path / f"{rows}.jsonl"
        path.write_text("".join(lines[slice(*rows)]))
        return replace(to(output=str(output)), data=DataOptions(files=[str(path)]))

    return prepare


def test_growing_that_is_killed_ends_in_the_same_bytes(rows_of, tmp_path):
    """All places of a first cache are in test_kill."""
    for rows in (80, 120):
        run(rows_of(rows, output=tmp_path / "clean"))
    run(rows_of(80, output=tmp_path / "first"))
    for name in ("root.after_link", "manifest.before_rename", "gc.forgotten"):
        cache = shutil.copytree(tmp_path / "first", tmp_path / name)
        stopped = child(rows_of(120, output=cache), f"{name}=kill")
        stopped.join(PATIENCE)
        assert stopped.exitcode == KILLED, name
        run(rows_of(120, output=cache))
        assert contents(cache) == contents(tmp_path / "clean")


def test_what_a_cache_was_is_kept_until_it_is_told_to_go(rows_of, tmp_path):
    for rows in (60, 80):
        run(rows_of(rows))
    cache = tmp_path / "cache"
    before = load_manifest(CacheFolder(cache))
    child(rows_of(120), "commit.done=kill@2").join(PATIENCE)
    kept = contents(cache)
    assert "is an unfinished run" in refusal(2, "gc", cache, "--yes")
    assert contents(cache) == kept
    assert "2 earlier roots" in run(rows_of(120)).text()
    kept = contents(cache)
    assert "2 earlier roots" in align("verify", cache, "--rescore", 0).out
    assert json.loads(align("inspect", cache, "--json").out)["superseded_files"] > 0
    dry = align("gc", cache, "--dry-run")
    assert (dry.code, before.root in dry.out) == (0, True)
    assert "--yes" in refusal(2, "gc", cache)
    assert contents(cache) == kept
    assert align("gc", cache, "--yes").code == 0
    named = {shard.file for shard in load_manifest(CacheFolder(cache)).shards}
    assert {path.name for path in (cache / "data").iterdir()} == named
    assert "0 files" in align("gc", cache).out


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
    require_same(output, course.whole())


class Late(StubReference):
    """A reference that takes long to open: meanwhile, others do something."""

    def __init__(self, meanwhile):
        super().__init__()
        self._meanwhile = meanwhile

    def open(self):
        self._meanwhile()
        return super().open()


@pytest.mark.parametrize("place", ["disk", "store"])
def test_a_late_part_does_not_publish_what_the_cache_has_outgrown(
    rows_of, tmp_path, request, place
):
    root = tmp_path if place == "disk" else request.getfixturevalue("bucket")
    few, many = (rows_of(rows, output=f"{root}/cache") for rows in (10, 20))
    grown = []

    def meanwhile():
        run(few)
        grown.append(run(many).manifest)
        with pytest.raises(FingerprintError):
            run(few)  # it would lose rows; its folder of work is there again

    with pytest.raises(LockedError):
        run(few, Late(meanwhile), share=Share(1, 1))
    assert load_manifest(CacheFolder(location(f"{root}/cache"))) == grown[0]
    assert run(many).was_complete


@pytest.fixture
def long_form(config, tmp_path):
    """Makes a cache of long-form rows, always in the same folder."""
    path = tmp_path / "long.jsonl"

    def make(*rows):
        lines = [dict(zip(("prompt", "completion", "score"), row, strict=True)) for row in rows]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        return run(replace(config, data=DataOptions(files=[str(path)])))

    return make


def test_a_prompt_may_gain_a_completion_and_not_lose_one(long_form, tmp_path):
    old = [
        *(("Why?", "because", 1.0), ("Why?", "so", 2.0), ("How?", "thus", 0.5)),
        *(("How?", "well", 1.5), ("Who?", "me", 1.0)),
    ]
    long_form(*old)
    grown = long_form(*old, ("Why?", "never mind", 3.0))
    assert (grown.manifest.rows, grown.tally.reused >= 5) == (3, True)
    before = contents(tmp_path / "cache" / "data")
    with pytest.raises(FingerprintError, match="1 of its 6 completions are not in the data"):
        long_form(*old[1:], ("Why?", "never mind", 3.0), ("Why?", "at all", 3.0))
    assert contents(tmp_path / "cache" / "data") == before


def test_a_lost_copy_of_a_row_is_noticed(rows_of, tmp_path):
    once = rows_of(20)
    path = tmp_path / "twice.jsonl"
    lines = (tmp_path / "(20,).jsonl").read_text()
    path.write_text(lines + lines.splitlines(keepends=True)[0])
    assert run(replace(once, data=DataOptions(files=[str(path)]))).manifest.rows == 21
    with pytest.raises(FingerprintError, match="1 of its 21 rows"):
        run(once)
    assert load_manifest(CacheFolder(tmp_path / "cache")).rows == 21
