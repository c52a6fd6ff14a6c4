import dataclasses
import json
import math
import os

import pyarrow.parquet as pq
import pytest

from align.schemas.errors import AlignError, CorruptionError, NonFiniteError, StorageError
from align.schemas.json_codec import digest, to_json
from align.schemas.rows import Rejected
from align.stages.storage import commits
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.commits import commit_unit, read_commits
from align.stages.storage.manifest_file import load_plan, write_plan
from align.stages.storage.shards import read_shard, write_shard
from align.stages.storage.verify_cache import check_shard
from support.flips import flipped
from support.made_caches import FACTS, at_once, block_of, plan_of


@pytest.fixture
def work(tmp_path):
    folder = CacheFolder(tmp_path / "cache")
    folder.prepare()
    work = folder.work("a" * 64)
    work.prepare()
    return work


def test_a_commit_describes_its_shard(work):
    block = block_of(9, 1)
    (work.commits / ".00000000.json.ab.tmp").write_text("half")  # left by a killed run
    commit = commit_unit(work, "run", 4, block, FACTS)
    check_shard(work.cache, commit)
    assert commit.file == f"part-00000004-{commit.sha256[:16]}.parquet"
    assert (commit.rows, commit.branches) == (9, len(block.logps))
    assert commit.tokens == sum(map(len, block.rows.completions))
    assert commit.logp_sum == pytest.approx(block.logps.sum(), rel=1e-12)
    assert commit.logp_min <= commit.logp_sum / commit.branches <= commit.logp_max
    assert read_commits(work, 5) == {4: commit}
    assert read_commits(work.cache.work("b" * 64), 1) == {}
    assert not list(work.tmp("run").iterdir())
    with pytest.raises(CorruptionError, match="none of the 3 units of this plan"):
        read_commits(work, 3)
    empty = commit_unit(work, "run", 0, block_of(0, 1), FACTS)
    assert (empty.rows, empty.row_groups, empty.logp_sum) == (0, 0, 0.0)
    assert len(read_shard(work.cache.data / empty.file).rows) == 0
    assert read_commits(work, 5) == {0: empty, 4: commit}


@pytest.fixture
def lossy():
    """Facts of a unit that lost three rows."""
    lost = [Rejected(1, 4, "oom", "big"), Rejected(0, 9, "oom", "big"), Rejected(0, 2, "null", "")]
    return dataclasses.replace(FACTS, rejected=tuple(lost))


def test_a_commit_names_the_rows_its_unit_lost(work, lossy):
    commit = commit_unit(work, "run", 4, block_of(9, 1), lossy)
    assert commit.quarantined == {"null": 1, "oom": 2}
    (entry,) = commit.quarantine
    assert entry.file == f"quarantine/part-00000004-{entry.sha256[:16]}.parquet"
    stored = pq.read_table(work.cache.root / entry.file).to_pylist()
    assert [row.pop("file_name") for row in stored] == ["a.jsonl", "a.jsonl", "b.jsonl"]
    found = [Rejected(**(row | {"file": int(row["file"], 16)})) for row in stored]
    assert found == sorted(lossy.rejected, key=lambda row: (row.file, row.row))
    backwards = dataclasses.replace(lossy, rejected=lossy.rejected[::-1])
    assert commit_unit(work, "again", 4, block_of(9, 1), backwards) == commit
    assert len(list(work.cache.quarantine.iterdir())) == 1


def test_a_losers_shard_that_was_there_before_is_left_for_its_owner(work):
    old = commit_unit(work, "old", 0, block_of(5, 2), FACTS)
    other = work.cache.work("b" * 64)
    other.prepare()
    commit_unit(other, "one", 0, block_of(5, 1), FACTS)
    commit_unit(other, "two", 0, block_of(5, 2), FACTS)
    check_shard(work.cache, old)


@pytest.mark.parametrize("same_bytes", [True, False])
def test_workers_without_any_lock_end_with_one_commit_per_unit(work, same_bytes):
    def compete(worker):
        for unit in range(6):
            block = block_of(5, unit if same_bytes else 10 * unit + worker)
            commit_unit(work, f"run-{worker}", unit, block, FACTS)

    assert at_once(4, compete) == [0] * 4
    kept = read_commits(work, 6)
    assert sorted(kept) == list(range(6))
    for commit in kept.values():
        check_shard(work.cache, commit)
    names = {path.name for path in work.cache.data.iterdir()}
    assert names == {commit.file for commit in kept.values()}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_is_never_stored(work, bad):
    block = block_of(5, 1)
    logps = block.logps.copy()
    logps[2] = bad
    with pytest.raises(NonFiniteError, match=r"unit 7: 1 of \d+ log-probs.*branch 2"):
        commit_unit(work, "run", 7, dataclasses.replace(block, logps=logps), FACTS)
    assert list(work.cache.data.iterdir()) == []


@pytest.mark.parametrize("change", ["bit", "end", "values"])
def test_a_disk_that_changes_bytes_on_the_way_is_noticed(work, monkeypatch, change):
    def spoil(name):
        if name != "shard.written":
            return
        (draft,) = work.tmp("run").iterdir()
        good = draft.read_bytes()
        draft.unlink()
        if change == "values":
            block = block_of(50, 1)
            write_shard(draft, dataclasses.replace(block, logps=block.logps * 2))
        else:
            bad = bytearray(good)
            bad[300] ^= 1  # a token id
            draft.write_bytes(bad if change == "bit" else good[:-9])

    monkeypatch.setattr(commits, "reach", spoil)
    with pytest.raises(StorageError, match="what was read back is not what was written"):
        commit_unit(work, "run", 0, block_of(50, 1), FACTS)
    assert read_commits(work, 1) == {}
    assert list(work.cache.data.iterdir()) == []


ELSEWHERE = {"file": "../x", "bytes": 1, "sha256": "0", "rows": 1}


def quarantine_of(work, commit):
    return work.cache.root / commit.quarantine[0].file


def edited(**fields):
    """Changes a commit and signs it anew."""

    def edit(work, _):
        plain = json.loads(work.commit(0).read_text()) | fields
        del plain["digest"]
        work.commit(0).write_text(to_json(plain | {"digest": digest(plain)}))

    return edit


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda work, commit: work.cache.shard(commit).unlink(), "is missing"),
        (lambda work, commit: quarantine_of(work, commit).unlink(), "is missing"),
        (lambda work, commit: os.truncate(quarantine_of(work, commit), 9), "instead of"),
        (edited(quarantine=[ELSEWHERE]), "names the quarantine '../x'"),
        (edited(unit=1), "names unit 1"),
        (edited(file="../../part"), "names unit 0 and file"),
        (edited(sha256="0" * 64), "names unit 0 and file"),
        (edited(rows="five"), "rows: expected a whole number"),
        (edited(bytes=1), "instead of 1"),
    ],
)
def test_a_commit_of_what_is_not_there_is_refused(work, lossy, harm, said):
    harm(work, commit_unit(work, "run", 0, block_of(5, 1), lossy))
    with pytest.raises(CorruptionError, match=said):
        read_commits(work, 2)


@pytest.mark.parametrize("flips", [60, pytest.param(600, marks=pytest.mark.long)])
def test_a_commit_or_a_plan_with_a_flipped_bit_is_refused(work, lossy, flips):
    commit = commit_unit(work, "run", 0, block_of(5, 1), lossy)
    plan = write_plan(work, plan_of([1]))
    for path, read, held in [
        (work.commit(0), lambda: read_commits(work, 1), {0: commit}),
        (work.plan, lambda: load_plan(work), plan),
    ]:
        good = path.read_bytes()
        for damaged in flipped(good, flips):
            path.write_bytes(damaged)
            with pytest.raises(AlignError, match=rf"{path.name}.*Remove") as refused:
                read()
            assert refused.value.exit_code in (4, 5)
        path.write_bytes(good)
        assert read() == held
