"""Manifests of caches: what they name, what is removed for them, what is refused."""

import dataclasses
import json

import pytest

from align.schemas.errors import CorruptionError, UsageError
from align.schemas.json_codec import digest, signed, to_json
from align.stages.storage.cache.cache_folder import CacheFolder
from align.stages.storage.cache.cleanup import collect, is_tidy
from align.stages.storage.cache.manifest_file import load_manifest, write_manifest
from align.stages.storage.disk import fs
from support.flips import flipped
from support.made_caches import make_cache


def test_a_manifest_is_the_same_whenever_and_wherever_it_is_made(cache, tmp_path):
    make_cache(tmp_path / "again")
    assert cache.manifest.read_bytes() == (tmp_path / "again" / "manifest.json").read_bytes()
    manifest = load_manifest(cache)
    assert manifest.rows == sum(shard.rows for shard in manifest.shards) == 15
    assert manifest.quarantined == {"null": 1, "oom": 3}
    assert manifest.notes == {"repeats": 1, "swaps": 6}  # the plan's, and two of each shard
    plain = json.loads(cache.manifest.read_text())
    held = {name: plain[name] for name in plain if name not in ("root", "sampling", *NOT_NAMED)}
    assert manifest.root == digest(held)


def leaves(value, path=()):
    """Every place in a JSON value, with what is there."""
    yield path, value
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, (*path, key))


def altered(value):
    """Other values of the same type, and of others."""
    if isinstance(value, bool) or value is None:
        return [1]
    if isinstance(value, int):
        return [value + 1, -1, float(value), str(value)]
    if isinstance(value, float):
        return [value + 0.5, float("nan"), float("inf"), None]
    if isinstance(value, str):
        return [value + "0", "../" + value, ""]
    if isinstance(value, list):
        return [[*value, 7], value[:-1] if value else [[]], {}]
    return [{**value, "extra": 1}, {}, []]


def put(plain, path, value):
    if not path:
        return value
    at = copy = json.loads(json.dumps(plain))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copy


NOT_NAMED = ("align_version", "model", "adapter")  # who made it of what; not what it holds


def test_no_field_of_a_manifest_can_be_altered_unnoticed(cache):
    text = cache.manifest.read_text()
    plain = json.loads(text)
    cases = 0
    for path, value in leaves(plain):
        for other in altered(value):
            if path and path[-1] in NOT_NAMED and isinstance(other, str):
                continue
            cache.manifest.write_text(json.dumps(put(plain, path, other), sort_keys=True))
            require_refused(cache)
            cases += 1
    assert cases > 200
    cache.manifest.write_text(text)
    load_manifest(cache)


def require_refused(cache):
    with pytest.raises(CorruptionError):
        load_manifest(cache)


def test_a_manifest_of_another_format_is_refused(cache):
    other = dataclasses.replace(load_manifest(cache), format_version=99)
    for more in ({}, {"grown_from": ""}):  # fields that this format does not have
        cache.manifest.write_text(to_json({**dataclasses.asdict(other), **more}))
        with pytest.raises(CorruptionError, match=r"manifest\.json.*99.*3"):
            load_manifest(cache)


def test_scribbles_and_flipped_bits_are_refused_without_a_traceback(cache, tmp_path):
    with pytest.raises(UsageError, match="align precompute-ref"):
        load_manifest(CacheFolder(tmp_path))
    text = cache.manifest.read_bytes()
    for case in (b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", text + b" ", text[:-1]):
        cache.manifest.write_bytes(case)
        with pytest.raises(CorruptionError):
            load_manifest(cache)
    plain = json.loads(text)
    kept = [to_json({name: plain[name]})[1:-2].encode() for name in NOT_NAMED]
    for damaged in flipped(text, 400):
        cache.manifest.write_bytes(damaged)
        if all(field in damaged for field in kept):
            require_refused(cache)


def test_a_finished_cache_is_not_finished_as_another_one(cache):
    whole, manifest = cache.manifest.read_bytes(), load_manifest(cache)
    assert write_manifest(cache, manifest)
    assert not write_manifest(cache, signed(dataclasses.replace(manifest, notes={})))
    assert cache.manifest.read_bytes() == whole


def test_leavings_of_dead_runs_go_and_files_of_others_stay(cache, tmp_path):
    plans = cache.work("c" * 64)
    plans.prepare()
    plans.spool.mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    (plans.spool / "link").symlink_to(tmp_path / "precious")
    (cache.private / ".trash-0123456789abcdef").mkdir()
    dead = cache.root / f".manifest.json.{'0' * 16}.tmp"
    dead.write_bytes(b"half")
    stray = cache.data / f"part-00000000-{'0' * 16}.parquet"
    stray.touch()
    (cache.data / "notes.txt").touch()
    assert not is_tidy(cache, load_manifest(cache))
    with fs.locked_draft(cache.manifest) as (alive, file):
        file.write(b"half")
        file.flush()
        # Of all who remove the same work one was first.
        assert [collect(cache, plans) for _ in range(3)] == [True, False, False]
        assert alive.exists()
    assert [path.name for path in cache.private.iterdir()] == ["LOCK"]
    assert not stray.exists()
    assert not dead.exists()
    assert (cache.data / "notes.txt").exists()
    assert (tmp_path / "precious" / "thesis").exists()


def test_nothing_is_removed_before_a_manifest_is_published(cache):
    work = cache.work("c" * 64)
    work.prepare()
    cache.manifest.unlink()
    with pytest.raises(UsageError, match="align precompute-ref"):
        collect(cache, work)
    assert len(list(cache.data.iterdir())) == 3
    assert work.root.is_dir()
