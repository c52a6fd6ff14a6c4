import errno
import os
import signal

import pytest

from align.schemas.cache import Commit
from align.schemas.errors import StorageError, UsageError, storage_error
from align.schemas.json_codec import from_json
from align.stages.storage import failpoints, fs
from align.stages.storage.run_folder import save_model
from align.stages.storage.shards import write_shard
from support.made_caches import block_of, in_child, make_cache, tree_of


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
    clean, messages = tree_of(tmp_path / "clean"), []
    for at in range(1, 200):
        fault, root = Fault(at), tmp_path / str(at)
        try:
            with failpoints.watch(fault):
                make_cache(root)
        except StorageError as refused:
            messages.append(str(refused))
        else:
            if fault.seen < at:  # some faults need not stop a run, as one of removing its leavings
                break
        for commit in root.rglob("commits/*.json"):
            named = from_json(Commit, commit.read_bytes())
            assert fs.sha256_of(root / "data" / named.file) == named.sha256
        assert not list(root.rglob("tmp/run/*"))
        make_cache(root)
        assert tree_of(root) == clean
    assert len(messages) > 60
    assert all("Free some space" in message for message in messages)


def test_syncing_reaches_the_disk_itself(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    fs.publish(tmp_path / "a", b"x", label="manifest")
    assert synced == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]


def test_a_full_disk_is_reported_with_the_bytes_it_lacks(tmp_path):
    said = r"3 bytes needed, [\d,]+ free\)\. Free some space"
    with failpoints.watch(Fault(2)), pytest.raises(StorageError, match=said):
        fs.publish(tmp_path / "a", b"abc", label="manifest")
    assert list(tmp_path.iterdir()) == []
    # Also where it is the library of the shards that writes.
    quota = Fault(2, errno.EDQUOT)
    with failpoints.watch(quota), pytest.raises(StorageError, match="--output"):
        write_shard(tmp_path / "a", block_of(30_000, 0))


def test_neither_a_link_nor_a_pipe_is_taken_for_a_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        fs.create(tmp_path / "link")
    with pytest.raises(StorageError):
        fs.open_lock(tmp_path / "link")
    fs.publish(tmp_path / "link", b"x", label="manifest")
    assert not fs.put_if_absent(tmp_path / "link", b"y", label="commit")
    assert not (tmp_path / "elsewhere").exists()
    assert (tmp_path / "link").read_bytes() == b"x"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="not a regular file"):  # at once
        fs.read_bytes(tmp_path / "pipe")


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
        fs.publish(tmp_path / "model" / "a", b"x", label="manifest")
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert found == {"model.safetensors": mode, "config.json": mode, "a": mode}


def test_each_kind_of_refusal_has_its_own_code_and_way_on(tmp_path):
    for code, number, way_on in (
        (2, errno.ENOENT, "See that the path is right"),
        (2, errno.EACCES, "Give this user the right"),
        (2, errno.ELOOP, "Links are not followed"),
        (74, errno.EMFILE, "limit on open files"),
        (74, errno.EIO, "Check the disk"),
    ):
        error = storage_error("open", tmp_path / "x", OSError(number, os.strerror(number)))
        assert error.exit_code == code
        for part in (os.strerror(number), way_on, str(tmp_path / "x")):
            assert part in str(error)


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

    with pytest.raises(UsageError, match="exists. Move it"):
        write()
    assert target.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_half_filled_goes_with_the_next_of_its_name(tmp_path):
    def die():
        with fs.new_folder(tmp_path / "w") as folder:
            (folder / "half").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    (tmp_path / "w.partial").mkdir()
    in_child(die)
    with fs.new_folder(tmp_path / "w") as folder:
        (folder / "whole").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"w", "w.partial"}
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["whole"]
