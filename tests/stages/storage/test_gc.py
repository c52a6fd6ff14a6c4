import pytest

from align.stages.storage.gc import collect
from align.stages.storage.layout import CacheFolder
from align.stages.storage.manifest import load_manifest


def test_a_finished_cache_holds_its_manifest_its_files_and_a_lock(cache):
    shards = {f"data/{shard.file}" for shard in load_manifest(cache).shards}
    quarantine = {entry.file for entry in load_manifest(cache).quarantine}
    found = {str(path.relative_to(cache.root)) for path in cache.root.rglob("*") if path.is_file()}
    assert found == {"manifest.json", "_align/LOCK"} | shards | quarantine
    assert [path.name for path in cache.private.iterdir()] == ["LOCK"]


def test_a_grown_cache_keeps_only_what_its_new_manifest_names(tmp_path, make_cache, tree):
    make_cache(tmp_path / "a", (1, 2, 3))
    make_cache(tmp_path / "a", (1, 9, 3, 4), rejects=False)
    make_cache(tmp_path / "b", (1, 9, 3, 4), rejects=False)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert not (tmp_path / "a" / "quarantine").exists()


def test_leavings_of_dead_runs_go_and_files_of_others_stay(cache):
    plans = cache.work("c" * 64)
    plans.prepare()
    (plans.root / "spool" / "ring").write_bytes(b"x")
    (cache.private / ".trash-0123456789abcdef").mkdir()
    (cache.private / "0123456789abcdef").mkdir()
    (cache.root / ".manifest.json.ab.tmp").touch()
    stray = cache.data / f"part-00000000-{'0' * 16}.parquet"
    stray.touch()
    (cache.data / "notes.txt").touch()
    collect(cache, load_manifest(cache))
    assert [path.name for path in cache.private.iterdir()] == ["LOCK"]
    assert not stray.exists()
    assert not (cache.root / ".manifest.json.ab.tmp").exists()
    assert (cache.data / "notes.txt").exists()


def test_nothing_is_removed_for_a_manifest_that_is_not_published(cache, tmp_path, make_cache):
    make_cache(tmp_path / "other", (7,))
    with pytest.raises(AssertionError):
        collect(cache, load_manifest(CacheFolder(tmp_path / "other")))
    assert len(list(cache.data.iterdir())) == 3


def test_a_link_among_the_leavings_is_removed_and_not_followed(cache, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    work = cache.work("c" * 64)
    work.prepare()
    (work.spool / "link").symlink_to(tmp_path / "precious")
    collect(cache, load_manifest(cache))
    assert (tmp_path / "precious" / "thesis").exists()
