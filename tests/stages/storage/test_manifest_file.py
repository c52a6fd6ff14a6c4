"""Manifests of caches: what they name, what is removed for them, what is refused."""

import dataclasses

import pytest

from align.schemas.cache import NOT_IN_ROOT
from align.schemas.errors import CorruptionError, UsageError
from align.schemas.json_codec import digest, to_json
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import CacheWork
from align.stages.storage.disk import fs
from support.flips import flipped
from support.made_caches import make_cache


def test_a_manifest_is_the_same_whenever_and_wherever_it_is_made(cache, tmp_path):
    make_cache(tmp_path / "again")
    assert cache.manifest_file.read_bytes() == (tmp_path / "again" / "manifest.json").read_bytes()
    manifest = cache.manifest()
    assert manifest.rows == sum(shard.rows for shard in manifest.shards) == 15
    assert manifest.reasons == {"null": 1, "oom": 3}
    assert manifest.notes == {"repeats": 1, "swaps": 6}  # the plan's, and two of each shard
    elsewhere = dataclasses.replace(manifest, model="elsewhere", align_version="0", root="")
    assert manifest.root == digest(elsewhere, without=NOT_IN_ROOT)
    for change in ({"rows": 1}, {"shards": ()}):
        assert manifest.root != digest(dataclasses.replace(manifest, **change), without=NOT_IN_ROOT)


def require_refused(cache):
    with pytest.raises(CorruptionError):
        cache.manifest()


def test_a_manifest_of_another_format_is_refused(cache):
    other = dataclasses.replace(cache.manifest(), format_version=99)
    for more in ({}, {"grown_from": ""}):  # fields that this format does not have
        cache.manifest_file.write_text(to_json({**dataclasses.asdict(other), **more}))
        with pytest.raises(CorruptionError, match=r"manifest\.json.*99.*5"):
            cache.manifest()


def test_scribbles_and_flipped_bits_are_refused_without_a_traceback(cache, tmp_path):
    with pytest.raises(UsageError, match="align precompute-ref"):
        Cache(tmp_path).manifest()
    text = cache.manifest_file.read_bytes()
    for case in (b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", text + b" ", text[:-1]):
        cache.manifest_file.write_bytes(case)
        with pytest.raises(CorruptionError):
            cache.manifest()
    for damaged in flipped(text, 400):
        cache.manifest_file.write_bytes(damaged)
        require_refused(cache)


def test_a_finished_cache_is_not_finished_as_another_one(cache):
    whole, manifest = cache.manifest_file.read_bytes(), cache.manifest()
    assert cache.finish(manifest)
    assert not cache.finish(dataclasses.replace(manifest, root="another"))
    assert cache.manifest_file.read_bytes() == whole


def test_leavings_of_dead_runs_go_and_files_of_others_stay(cache, tmp_path):
    plans = CacheWork(cache.root, "c" * 64)
    plans.prepare_work()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    (plans.encoded / "link").symlink_to(tmp_path / "precious")
    (cache.private / ".trash-0123456789abcdef").mkdir()
    dead = cache.root / f".manifest.json.{'0' * 16}.tmp"
    dead.write_bytes(b"half")
    stray = cache.data / f"part-00000000-{'0' * 16}.parquet"
    stray.touch()
    (cache.data / "notes.txt").touch()
    assert not cache.is_tidy(cache.manifest())
    with fs.locked_draft(cache.manifest_file) as (alive, file):
        file.write(b"half")
        file.flush()
        # Of all who remove the same work one was first.
        assert [plans.tidy() for _ in range(3)] == [True, False, False]
        assert alive.exists()
    assert [path.name for path in cache.private.iterdir()] == ["LOCK"]
    assert not stray.exists()
    assert not dead.exists()
    assert (cache.data / "notes.txt").exists()
    assert (tmp_path / "precious" / "thesis").exists()


def test_nothing_is_removed_before_a_manifest_is_published(cache):
    cache = CacheWork(cache.root, "c" * 64)
    cache.prepare_work()
    cache.manifest_file.unlink()
    with pytest.raises(UsageError, match="align precompute-ref"):
        cache.tidy()
    assert len(list(cache.data.iterdir())) == 3
    assert cache.work.is_dir()
