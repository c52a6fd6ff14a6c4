import os
import signal

import pytest

from align.schemas.errors import UsageError
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.cleanup import collect, is_tidy, remove_superseded, superseded
from align.stages.storage.manifest_file import load_manifest
from align.stages.storage.verify_cache import damaged_units
from support.made_caches import in_child, make_cache, tree_of


def test_a_finished_cache_holds_its_manifest_its_files_and_a_lock(cache):
    shards = {f"data/{shard.file}" for shard in load_manifest(cache).shards}
    quarantine = {entry.file for entry in load_manifest(cache).quarantine}
    found = {str(path.relative_to(cache.root)) for path in cache.root.rglob("*") if path.is_file()}
    assert found == {"manifest.json", "_align/LOCK"} | shards | quarantine
    assert [path.name for path in cache.private.iterdir()] == ["LOCK"]


def test_a_grown_cache_keeps_what_it_held_until_gc_removes_it(tmp_path):
    make_cache(tmp_path / "a", (1, 2, 3))
    folder = CacheFolder(tmp_path / "a")
    before = load_manifest(folder)
    make_cache(tmp_path / "a", (1, 9, 3, 4), rejects=False)
    now = load_manifest(folder)
    assert load_manifest(folder, before.root) == before != now
    assert not damaged_units(folder, before)
    assert is_tidy(folder, now)
    found = superseded(folder, now)
    mine = {folder.data / shard.file for shard in before.shards} - {
        folder.data / shard.file for shard in now.shards
    }
    assert mine | {folder.root / entry.file for entry in before.quarantine} == {*found.files}
    assert found.roots == (before.root,)
    assert found.bytes == sum(path.stat().st_size for path in found.files) > 0
    remove_superseded(folder)
    assert load_manifest(folder, before.root) == now
    make_cache(tmp_path / "b", (1, 9, 3, 4), rejects=False)
    assert tree_of(tmp_path / "a") == tree_of(tmp_path / "b")
    assert not (tmp_path / "a" / "quarantine").exists()
    assert not superseded(folder, now)


def test_removing_that_is_killed_is_carried_through_by_the_next(tmp_path):
    for units in ((1, 2, 3), (1, 9, 3, 4)):
        make_cache(tmp_path / "a", units)
    make_cache(tmp_path / "b", (1, 9, 3, 4))
    folder = CacheFolder(tmp_path / "a")
    now = load_manifest(folder)
    killed = in_child(lambda: remove_superseded(folder), "superseded.forgotten=kill")
    assert os.WTERMSIG(killed) == signal.SIGKILL
    assert not is_tidy(folder, now)
    remove_superseded(folder)
    assert tree_of(tmp_path / "a") == tree_of(tmp_path / "b")


def test_leavings_of_dead_runs_go_and_files_of_others_stay(cache):
    plans = cache.work("c" * 64)
    plans.prepare()
    plans.spool.mkdir()
    (plans.spool / "ring").write_bytes(b"x")
    (cache.private / ".trash-0123456789abcdef").mkdir()
    (cache.private / "0123456789abcdef").mkdir()
    (cache.root / ".manifest.json.ab.tmp").touch()
    stray = cache.data / f"part-00000000-{'0' * 16}.parquet"
    stray.touch()
    (cache.data / "notes.txt").touch()
    collect(cache, cache.works())
    assert [path.name for path in cache.private.iterdir()] == ["LOCK"]
    assert not stray.exists()
    assert not (cache.root / ".manifest.json.ab.tmp").exists()
    assert (cache.data / "notes.txt").exists()


def test_nothing_is_removed_before_a_manifest_is_published(cache):
    work = cache.work("c" * 64)
    work.prepare()
    cache.manifest.unlink()
    with pytest.raises(UsageError, match="is not a finished cache"):
        collect(cache, [work])
    assert len(list(cache.data.iterdir())) == 3
    assert work.root.is_dir()


def test_work_that_began_after_the_manifest_stays_with_all_it_may_need(cache):
    later = cache.work("c" * 64)
    later.prepare()
    shard = cache.data / f"part-00000000-{'0' * 16}.parquet"
    shard.touch()
    assert not collect(cache, [cache.work("d" * 64)])
    assert later.root.is_dir()
    assert shard.exists()


def test_of_all_who_remove_the_same_work_one_was_first(cache):
    work = cache.work("c" * 64)
    work.prepare()
    assert [collect(cache, [work]) for _ in range(3)] == [True, False, False]


def test_a_link_among_the_leavings_is_removed_and_not_followed(cache, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    work = cache.work("c" * 64)
    work.prepare()
    work.spool.mkdir()
    (work.spool / "link").symlink_to(tmp_path / "precious")
    collect(cache, cache.works())
    assert (tmp_path / "precious" / "thesis").exists()
