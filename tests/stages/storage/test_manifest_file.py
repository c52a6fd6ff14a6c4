"""Manifests of caches and tables: what they name, what is removed for them, what is refused."""

import dataclasses
import json
import os

import polars as pl
import pytest

from align.schemas.errors import CorruptionError, UsageError
from align.schemas.json_codec import digest, signed, to_json
from align.schemas.samples import Drawing
from align.stages.storage.cache.cache_folder import CacheFolder
from align.stages.storage.cache.cleanup import collect, is_tidy
from align.stages.storage.cache.manifest_file import load_manifest, write_manifest
from align.stages.storage.disk import fs
from align.stages.storage.tables import TableFolder, read_table
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
        with pytest.raises(CorruptionError, match="it has format 99, and this align reads 3"):
            load_manifest(cache)


def test_scribbles_and_flipped_bits_are_refused_without_a_traceback(cache, tmp_path):
    with pytest.raises(UsageError, match="not a finished cache"):
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
    with pytest.raises(UsageError, match="is not a finished cache"):
        collect(cache, work)
    assert len(list(cache.data.iterdir())) == 3
    assert work.root.is_dir()


TABLE = pl.DataFrame({"prompt": ["a", "b"], "score": [1.0, None]})


def published(table_folder, table=TABLE, **more):
    how = {"made_from": {"prompts": "p"}, "settings": {"n": 2}, "counts": {"rows": 2}} | more
    return table_folder.publish(table, **how)


@pytest.fixture
def table_folder(tmp_path):
    made = TableFolder.at(str(tmp_path / "out"), "samples")
    made.prepare()
    return made


def test_what_is_published_is_read_back_and_changes_no_file_when_published_again(table_folder):
    assert table_folder.find() is None
    with pytest.raises(UsageError, match="not a finished table of samples"):
        read_table(table_folder)
    manifest = published(table_folder)
    files = (table_folder.file, table_folder.manifest)
    times = [path.stat().st_mtime_ns for path in files]
    found, table = read_table(table_folder)
    assert found == manifest == table_folder.find() == published(table_folder)
    assert [path.stat().st_mtime_ns for path in files] == times
    assert table.equals(TABLE)
    assert (manifest.rows, manifest.made_from) == (2, {"prompts": "p"})


def test_the_root_names_the_content_and_what_it_was_made_from(table_folder, tmp_path):
    root = published(table_folder).root
    other = TableFolder.at(str(tmp_path / "other"), "samples")
    other.prepare()
    assert published(other).root == root
    assert published(other, made_from={"prompts": "q"}).root != root
    assert published(other, TABLE.reverse()).root != root
    rows = pl.DataFrame({"n": range(600_000)})
    chunks = pl.concat([rows[:7], rows[7:300_000], rows[300_000:]], rechunk=False)
    assert published(other, chunks).root == published(table_folder, rows).root


def test_how_samples_were_drawn_is_kept_beside_the_root(table_folder):
    plain = published(table_folder)
    told = published(table_folder, sampling=Drawing(0.7, 1.0, 0))
    assert told.root == plain.root
    assert table_folder.find().sampling == Drawing(0.7, 1.0, 0)


def test_a_table_is_read_back_however_large_its_file_is_said_to_be(table_folder, monkeypatch):
    """A terabyte, for whoever asks the system."""
    published(table_folder)
    fstat = os.fstat

    def large(descriptor):
        found = fstat(descriptor)
        return os.stat_result((*found[:6], 1 << 40, *found[7:10]))

    monkeypatch.setattr(os, "fstat", large)
    assert read_table(table_folder)[1].equals(TABLE)


def replaced(path, old, new):
    held = path.read_bytes()
    assert old in held
    path.write_bytes(held.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("file", b"PAR1", b"PAR2", "is not what"),
        ("file", b"PAR1", b"PAR1 ", "is not what"),
        ("manifest", b"}", b"", "damaged"),
        ("manifest", b'"rows":2', b'"rows":3', "not what was written"),
    ],
)
def test_a_changed_table_is_refused(table_folder, name, old, new, said):
    published(table_folder)
    replaced(getattr(table_folder, name), old, new)
    with pytest.raises(CorruptionError, match=said):
        read_table(table_folder)


def test_a_table_of_another_kind_is_neither_read_nor_replaced(table_folder, bucket):
    published(table_folder)
    with pytest.raises(UsageError, match="holds samples, not judged"):
        read_table(TableFolder(table_folder.root, "judged"))
    published(TableFolder(bucket / "mixed", "samples"))
    with pytest.raises(UsageError, match="holds samples, not judged"):
        TableFolder(bucket / "mixed", "judged").prepare()


def test_a_table_in_a_store_is_published_and_replaced(bucket):
    table_folder = TableFolder(bucket / "out", "samples")
    table_folder.prepare()
    published(table_folder)
    root = published(table_folder, TABLE.reverse()).root
    manifest, table = read_table(table_folder)
    assert manifest.root == root
    assert table.equals(TABLE.reverse())
    assert table_folder.lock.parent.is_dir()
