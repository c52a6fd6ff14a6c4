"""Caches in the making and finished: what is stored, named, refused, and removed in the end."""

import dataclasses
import json
import math
import os

import pytest

from align.schemas.cache import NOT_IN_ROOT
from align.schemas.errors import CorruptionError, NonFiniteError, UsageError
from align.schemas.json_codec import digest, to_json
from align.schemas.rows import Rejected
from align.stages.storage.cache_work import CacheWork
from align.stages.storage.disk import fs
from support.flips import flip_bits
from support.made_caches import FACTS, at_once, block_of, make_cache, plan_of


@pytest.fixture
def work(tmp_path):
    """One that is being made."""
    work = CacheWork(tmp_path / "cache", "a" * 64)
    work.prepare()
    work.prepare_work()
    return work


LOST = (Rejected(1, 4, "oom", "big"), Rejected(0, 9, "oom", "big"), Rejected(0, 2, "null", ""))
LOSSY = FACTS | {"rejected": LOST}


def test_a_losers_shard_that_was_there_before_is_left_for_its_owner(work):
    old = work.commit(0, block_of(5, 2), **FACTS)
    other = CacheWork(work.root, "b" * 64)
    other.prepare_work()
    other.commit(0, block_of(5, 1), **FACTS)
    other.commit(0, block_of(5, 2), **FACTS)
    work.check(old)


@pytest.mark.parametrize("same_bytes", [True, False])
def test_workers_without_any_lock_end_with_one_record_per_shard(work, same_bytes):
    def compete(worker):
        for number in range(6):
            work.commit(
                number, block_of(5, number if same_bytes else 10 * number + worker), **FACTS
            )

    assert at_once(4, compete) == [0] * 4
    kept = work.done()
    assert sorted(kept) == list(range(6))
    for shard in kept.values():
        work.check(shard)
    assert {path.name for path in work.data.iterdir()} == {shard.file for shard in kept.values()}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_is_never_stored(work, bad):
    block = block_of(5, 1)
    logps = block.logps.copy()
    logps[2] = bad
    with pytest.raises(NonFiniteError, match="shard 7"):
        work.commit(7, block.with_columns(ref_logp=logps), **FACTS)
    assert list(work.data.iterdir()) == []


def edited(**fields):
    """Changes a record and signs it anew."""

    def edit(work, _):
        plain = json.loads(work.record(0).read_text()) | fields
        del plain["digest"]
        work.record(0).write_text(to_json(plain | {"digest": digest(plain)}))

    return edit


@pytest.mark.parametrize(
    "harm",
    [
        lambda work, shard: work.shard(shard).unlink(),
        lambda work, shard: os.truncate(work.shard(shard), 9),
        edited(bytes=1),
    ],
)
def test_a_missing_or_short_shard_is_made_again(work, harm):
    shard = work.commit(0, block_of(5, 1), **LOSSY)
    harm(work, shard)
    assert work.done(is_own=False) == {}
    assert work.record(0).exists()
    assert work.done() == {}
    assert not work.record(0).exists()
    assert work.commit(0, block_of(5, 1), **LOSSY) == shard
    assert work.done() == {0: shard}
    edited(rows="five")(work, shard)
    with pytest.raises(CorruptionError, match="rows"):
        work.done()


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


def test_a_manifest_of_another_format_is_refused(cache):
    other = dataclasses.replace(cache.manifest(), format_version=99)
    for more in ({}, {"grown_from": ""}):  # fields that this format does not have
        cache.manifest_file.write_text(to_json({**dataclasses.asdict(other), **more}))
        with pytest.raises(CorruptionError, match=r"manifest\.json.*99.*5"):
            cache.manifest()


def test_a_manifest_a_plan_or_a_record_with_a_flipped_bit_is_refused(cache, work):
    shard, plan = work.commit(0, block_of(5, 1), **LOSSY), work.put_plan(plan_of([1]))
    for path, read, held in [
        (cache.manifest_file, cache.manifest, cache.manifest()),
        (work.plan, work.find_plan, plan),
        (work.record(0), work.done, {0: shard}),
    ]:
        for _ in flip_bits(path):
            with pytest.raises(CorruptionError, match=path.name):
                read()
        assert read() == held


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
