"""Folders of caches and runs: whose they are, who owns them, what the dead left."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from align.schemas.errors import CorruptionError, LockedError, UsageError
from align.schemas.round_record import RoundRecord
from align.stages.storage.cache_work import CacheWork
from align.stages.storage.disk.locks import held, is_owned, lock_of, owner_lock, try_owner_lock
from align.stages.storage.run.rounds_folder import ROUNDS, RoundsFolder
from align.stages.storage.run.run_folder import trash_name
from support.checkpoint_saves import save
from support.made_caches import FACTS, at_once, block_of, in_child


def test_a_folder_is_made_once_and_hidden_where_rows_are_drafted(tmp_path):
    cache = CacheWork(tmp_path / "a" / "b", "f" * 64)
    (tmp_path / "a" / "b" / "_align").mkdir(parents=True)  # it was only begun
    cache.prepare()
    cache.prepare()
    assert cache.data.is_dir()
    cache.prepare_work()
    assert cache.commits.is_dir()
    cache.commit(0, block_of(2, 1), **FACTS)
    assert (cache.work / "tmp").stat().st_mode & 0o777 == 0o700


def test_a_second_owner_is_refused_with_the_name_of_the_first(prepared_run):
    lock_of(prepared_run.root).write_text("process 1")  # of one that died: it locks nothing
    with owner_lock(prepared_run.root, "early-run"):
        for who, named in (("", "early-run"), ("scribble", "scribble")):
            if who:
                lock_of(prepared_run.root).write_text(who)
            with (
                pytest.raises(LockedError, match=named) as refused,
                owner_lock(prepared_run.root, "late-run"),
            ):
                pass
            assert refused.value.exit_code == 75
            assert str(prepared_run.root) in str(refused.value)
        with try_owner_lock(prepared_run.root, "late-run") as is_owner:
            assert not is_owner
        assert is_owned(prepared_run.root)
    assert not is_owned(prepared_run.root)
    with owner_lock(prepared_run.root, "late-run"):
        assert f"process {os.getpid()}" in lock_of(prepared_run.root).read_text()


def test_a_forked_worker_does_not_keep_the_folder_after_its_owner(prepared_run):
    def own():
        told, tell = os.pipe()
        with owner_lock(prepared_run.root, "run"):
            worker = os.fork()
            if not worker:
                os.write(tell, b"1")
                signal.pause()
            os.read(told, 1)
        try:
            with owner_lock(prepared_run.root, "next"):
                pass
        finally:
            os.kill(worker, signal.SIGKILL)

    assert in_child(own) == 0


def test_of_many_threads_and_processes_one_at_a_time_holds_a_lock(tmp_path):
    path, count = tmp_path / "lock", tmp_path / "count"
    count.write_text("0")

    def add(_):
        for _ in range(20):
            with held(path):
                count.write_text(str(int(count.read_text()) + 1))

    def add_in_threads(_):
        with ThreadPoolExecutor(2) as pool:
            [*pool.map(add, range(2))]

    assert at_once(2, add_in_threads) == [0, 0]
    assert count.read_text() == "80"


@pytest.mark.parametrize(
    "begin",
    [
        lambda folder: save(folder, 7),
        lambda folder: folder.metrics.touch(),
        lambda folder: folder.model.mkdir(),
    ],
)
def test_a_run_that_was_begun_is_not_begun_anew(prepared_run, begin):
    prepared_run.require_new()
    begin(prepared_run)
    with pytest.raises(UsageError, match=rf"{prepared_run.root} .*--resume auto.*--output"):
        prepared_run.require_new()


def test_what_killed_runs_left_is_swept_up(prepared_run):
    save(prepared_run, 1)
    draft = prepared_run.draft(2, "dead-run")
    draft.mkdir()
    (draft / "state-0.pt").write_bytes(b"half")
    trash_name(prepared_run.step(9)).mkdir()
    (prepared_run.checkpoints / ".latest.0123456789abcdef.tmp").touch()
    (prepared_run.root / ".metrics.jsonl.0123456789abcdef.tmp").touch()
    prepared_run.sweep()
    left = {path.name for path in prepared_run.checkpoints.iterdir()}
    assert left == {"latest", "step-00000001"}
    assert {path.name for path in prepared_run.root.iterdir()} == {"_align", "checkpoints"}


def test_drafts_of_killed_rounds_are_removed(tmp_path):
    folder = RoundsFolder(tmp_path / "rounds")
    folder.prepare()
    for path in (folder.prompts, folder.held_out_prompts):
        path.with_name(f".{path.name}.{'0' * 16}.tmp").write_bytes(b"half")
    folder.prepare()
    assert not [*folder.root.rglob(".*.tmp")]


def test_a_round_that_has_the_record_of_another_is_refused(tmp_path):
    rounds = RoundsFolder(tmp_path)
    for number in (1, 2):
        rounds.round(number).root.mkdir()
        ROUNDS.put(rounds.round(number).record, RoundRecord(1, 1, {}, {}, {}, {}, {}, None))
    with pytest.raises(CorruptionError, match=r"round-002/round\.json"):
        rounds.finished()
