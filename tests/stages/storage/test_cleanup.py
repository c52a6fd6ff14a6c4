import pytest

from align.schemas.errors import UsageError
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.cleanup import collect, is_tidy, remove_superseded, superseded
from align.stages.storage.manifest_file import load_manifest
from align.stages.storage.verify_cache import damaged_units
from support.made_caches import make_cache, tree_of


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


def test_leavings_of_dead_runs_go_and_files_of_others_stay(cache, tmp_path):
    plans = cache.work("c" * 64)
    plans.prepare()
    plans.spool.mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    (plans.spool / "link").symlink_to(tmp_path / "precious")
    (cache.private / ".trash-0123456789abcdef").mkdir()
    (cache.root / ".manifest.json.ab.tmp").touch()
    stray = cache.data / f"part-00000000-{'0' * 16}.parquet"
    stray.touch()
    (cache.data / "notes.txt").touch()
    assert not is_tidy(cache, load_manifest(cache))
    collect(cache, cache.works())
    assert [path.name for path in cache.private.iterdir()] == ["LOCK"]
    assert not stray.exists()
    assert not (cache.root / ".manifest.json.ab.tmp").exists()
    assert (cache.data / "notes.txt").exists()
    assert (tmp_path / "precious" / "thesis").exists()


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
    # Of all who remove the same work one was first.
    assert [collect(cache, [later]) for _ in range(3)] == [True, False, False]
