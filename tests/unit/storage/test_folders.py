"""Folders of caches and runs: whose they are, who owns them, what the dead left."""

import os

import pytest

from align.schemas.errors import LockedError
from align.stages.storage.disk.locks import is_owned, lock_of, owner_lock, try_owner_lock
from align.stages.storage.run.run_folder import trash_name
from support.checkpoint_saves import save


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
