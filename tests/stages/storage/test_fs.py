"""What is written is there as a whole or not at all, whatever fails: files, folders and units."""

import errno
import json
import math
import os
import signal

import pyarrow.parquet as pq
import pytest

from align.schemas.cache import Shard
from align.schemas.errors import CorruptionError, NonFiniteError, StorageError, UsageError
from align.schemas.json_codec import digest, from_signed_json, to_json
from align.schemas.rows import Rejected
from align.stages.storage.cache_work import CacheWork
from align.stages.storage.disk import fs
from align.stages.storage.run.run_folder import save_model
from align.stages.storage.shards import read_shard
from support import disk_faults
from support.flips import flipped
from support.made_caches import (
    FACTS,
    NAMES,
    at_once,
    block_of,
    in_child,
    make_cache,
    plan_of,
    tree_of,
)


class Fault:
    """Makes the Nth operation fail, and counts them."""

    def __init__(self, at, error=errno.ENOSPC):
        self.at, self.error, self.seen = at, error, 0

    def __call__(self, op):
        self.seen += 1
        if self.seen == self.at:
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.slow
def test_no_operation_that_fails_commits_half_a_unit(tmp_path):
    """N = 1, 2, ... until a run meets no fault: refused with 74, and a rerun converges."""
    make_cache(tmp_path / "clean")
    clean, codes = tree_of(tmp_path / "clean"), []
    for at in range(1, 200):
        fault, root = Fault(at), tmp_path / str(at)
        try:
            with disk_faults.watch(fault):
                make_cache(root)
        except StorageError as refused:
            codes.append(refused.exit_code)
        else:
            if fault.seen < at:  # some faults need not stop a run, as one of removing its leavings
                break
        for commit in root.rglob("commits/*.json"):
            named = from_signed_json(Shard, commit.read_bytes())
            assert fs.sha256_of(root / "data" / named.file) == named.sha256
        assert not list(root.rglob("tmp/*"))
        make_cache(root)
        assert tree_of(root) == clean
    assert codes == [74] * len(codes)
    assert len(codes) > 40


def test_syncing_reaches_the_disk_itself(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    fs.publish(tmp_path / "a", b"x")
    assert synced == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]


def test_a_full_disk_leaves_nothing_and_names_the_file(tmp_path):
    for write in (fs.publish, fs.put_if_absent):
        with disk_faults.watch(Fault(1)), pytest.raises(StorageError) as refused:
            write(tmp_path / "a", b"abc")
        assert refused.value.exit_code == 74
        assert str(tmp_path) in str(refused.value)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mask", "mode"), [(0o027, 0o640), (0o002, 0o664)])
def test_the_umask_decides_who_may_read_a_file(tmp_path, mask, mode):
    """Whatever the library thought that wrote it: safetensors lets nobody else read its files."""

    def write(draft):
        for name in ("model.safetensors", "config.json"):
            (draft / name).write_text(name)
        (draft / "model.safetensors").chmod(0o600)

    before = os.umask(mask)
    try:
        save_model(tmp_path / "model", write, "run")
        fs.publish(tmp_path / "model" / "a", b"x")
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert found == {"model.safetensors": mode, "config.json": mode, "a": mode}


@pytest.mark.parametrize(
    ("code", "number"),
    [(2, errno.ENOENT), (2, errno.EACCES), (74, errno.EMFILE), (74, errno.EIO)],
)
def test_each_kind_of_refusal_has_its_own_code_and_names_the_path(tmp_path, code, number):
    def refuse(op):
        raise OSError(number, os.strerror(number))

    with disk_faults.watch(refuse), pytest.raises(StorageError) as refused:
        fs.make_folder(tmp_path / "x")
    assert refused.value.exit_code == code
    for part in (os.strerror(number), str(tmp_path / "x")):
        assert part in str(refused.value)


def test_of_twelve_writers_of_one_file_one_wins(tmp_path):
    won = tmp_path / "won"
    won.mkdir()

    def put(writer):
        if fs.put_if_absent(tmp_path / "a", b"%d" % writer):
            (won / str(writer)).touch()

    assert at_once(12, put) == [0] * 12
    assert [path.name.encode() for path in won.iterdir()] == [(tmp_path / "a").read_bytes()]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "won"}


def test_a_file_system_without_hard_links_gets_the_file_by_a_rename(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    assert fs.put_if_absent(tmp_path / "a", b"first")
    assert not fs.put_if_absent(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_draft_goes_when_its_writer_is_dead_and_only_then(tmp_path):
    target, token = tmp_path / "rows.jsonl", "0123456789abcdef"
    mine = tmp_path / f".rows.jsonl.{token}x.tmp"
    other = tmp_path / f".other.{token}.tmp"
    for path in (mine, other):
        path.write_text("a person's")

    def die():
        with fs.new_file(target, replaces=True) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    in_child(die)
    assert len(list(tmp_path.iterdir())) == 3
    with fs.new_file(target, replaces=True) as file:
        file.write(b"whole")
        file.flush()
        (alive,) = set(tmp_path.iterdir()) - {mine, other}
        fs.drop_drafts(target)
        assert alive.exists()
    assert set(tmp_path.iterdir()) == {target, mine, other}
    assert target.read_bytes() == b"whole"


def test_a_new_file_never_replaces_one_written_meanwhile(tmp_path):
    target = tmp_path / "align.yaml"

    def write():
        with fs.new_file(target, replaces=False) as file:
            file.write(b"ours")
            target.write_text("theirs")

    with pytest.raises(UsageError, match="align.yaml"):
        write()
    assert target.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


@pytest.fixture
def cache(tmp_path):
    """One that is being made."""
    cache = CacheWork(tmp_path / "cache", "a" * 64)
    cache.prepare()
    cache.prepare_work()
    return cache


def test_a_record_describes_its_shard(cache):
    block = block_of(9, 1)
    (cache.commits / ".00000000.json.ab.tmp").write_text("half")  # left by a killed run
    shard = cache.commit(4, block, **FACTS)
    cache.check(shard)
    assert shard.file == f"part-00000004-{shard.sha256[:16]}.parquet"
    assert (shard.rows, shard.branches) == (9, len(block.logps))
    assert shard.tokens == sum(map(len, block.completions))
    assert cache.done() == {4: shard}
    assert CacheWork(cache.root, "b" * 64).done() == {}
    assert not list(cache.work.glob("tmp/*"))
    empty = cache.commit(0, block_of(0, 1), **FACTS)
    assert (empty.rows, empty.branches) == (0, 0)
    assert len(read_shard(cache.shard(empty))) == 0
    assert cache.done() == {0: empty, 4: shard}


LOST = (Rejected(1, 4, "oom", "big"), Rejected(0, 9, "oom", "big"), Rejected(0, 2, "null", ""))
LOSSY = FACTS | {"rejected": LOST}


def test_a_record_names_the_rows_its_shard_lost_and_one_file_of_the_cache_all_of_them(cache):
    shard = cache.commit(4, block_of(9, 1), **LOSSY)
    assert shard.reasons == {"null": 1, "oom": 2}
    in_order = sorted(LOST, key=lambda row: (row.file, row.row))
    assert [*shard.rejected] == in_order
    assert cache.commit(4, block_of(9, 1), **LOSSY | {"rejected": LOST[::-1]}) == shard
    assert cache.write_rejected([], NAMES) is None
    entry = cache.write_rejected(in_order, NAMES)
    cache.check(entry)
    stored = pq.read_table(cache.rejected).to_pylist()
    assert [row.pop("file_name") for row in stored] == ["a.jsonl", "a.jsonl", "b.jsonl"]
    assert [Rejected(**(row | {"file": int(row["file"], 16)})) for row in stored] == in_order


def test_a_losers_shard_that_was_there_before_is_left_for_its_owner(cache):
    old = cache.commit(0, block_of(5, 2), **FACTS)
    other = CacheWork(cache.root, "b" * 64)
    other.prepare_work()
    other.commit(0, block_of(5, 1), **FACTS)
    other.commit(0, block_of(5, 2), **FACTS)
    cache.check(old)


@pytest.mark.parametrize("same_bytes", [True, False])
def test_workers_without_any_lock_end_with_one_record_per_shard(cache, same_bytes):
    def compete(worker):
        for number in range(6):
            cache.commit(
                number, block_of(5, number if same_bytes else 10 * number + worker), **FACTS
            )

    assert at_once(4, compete) == [0] * 4
    kept = cache.done()
    assert sorted(kept) == list(range(6))
    for shard in kept.values():
        cache.check(shard)
    assert {path.name for path in cache.data.iterdir()} == {shard.file for shard in kept.values()}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_is_never_stored(cache, bad):
    block = block_of(5, 1)
    logps = block.logps.copy()
    logps[2] = bad
    with pytest.raises(NonFiniteError, match="shard 7"):
        cache.commit(7, block.with_columns(ref_logp=logps), **FACTS)
    assert list(cache.data.iterdir()) == []


def edited(**fields):
    """Changes a record and signs it anew."""

    def edit(cache, _):
        plain = json.loads(cache.record(0).read_text()) | fields
        del plain["digest"]
        cache.record(0).write_text(to_json(plain | {"digest": digest(plain)}))

    return edit


@pytest.mark.parametrize(
    "harm",
    [
        lambda cache, shard: cache.shard(shard).unlink(),
        lambda cache, shard: os.truncate(cache.shard(shard), 9),
        edited(bytes=1),
    ],
)
def test_a_record_whose_shard_is_missing_or_short_goes_so_that_it_is_made_again(cache, harm):
    shard = cache.commit(0, block_of(5, 1), **LOSSY)
    harm(cache, shard)
    assert cache.done(is_own=False) == {}
    assert cache.record(0).exists()
    assert cache.done() == {}
    assert not cache.record(0).exists()
    assert cache.commit(0, block_of(5, 1), **LOSSY) == shard
    assert cache.done() == {0: shard}
    edited(rows="five")(cache, shard)
    with pytest.raises(CorruptionError, match="rows"):
        cache.done()


@pytest.mark.parametrize("flips", [60, pytest.param(600, marks=pytest.mark.long)])
def test_a_record_or_a_plan_with_a_flipped_bit_is_refused(cache, flips):
    shard = cache.commit(0, block_of(5, 1), **LOSSY)
    plan = cache.put_plan(plan_of([1]))
    for path, read, held in [
        (cache.record(0), cache.done, {0: shard}),
        (cache.plan, cache.find_plan, plan),
    ]:
        good = path.read_bytes()
        for damaged in flipped(good, flips):
            path.write_bytes(damaged)
            with pytest.raises(CorruptionError, match=path.name):
                read()
        path.write_bytes(good)
        assert read() == held
