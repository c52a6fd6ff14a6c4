import errno
import os
import re
import signal

import pytest

from align.schemas.cache import Commit
from align.schemas.errors import StorageError, UsageError, storage_error
from align.schemas.json_codec import from_json
from align.stages.storage import failpoints, fs
from align.stages.storage.shards import write_shard
from support.made_caches import block_of, in_child, make_cache, tree_of


class Fault:
    """Makes the Nth operation fail, and counts them."""

    def __init__(self, at, error):
        self.at, self.error, self.seen = at, error, []

    def __call__(self, op):
        self.seen.append(op.name)
        if len(self.seen) == self.at:
            raise OSError(self.error, os.strerror(self.error))


KINDS = {
    "create", "write", "fsync", "fsync_folder", "rename", "link", "unlink", "make_folder",
    "remove_tree", "open_lock", "rewrite",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_no_operation_that_fails_commits_half_a_unit(tmp_path, clean_tree, error):
    """N = 1, 2, ... until a run meets no fault: refused with 74, and a rerun converges."""
    failed, messages = set(), []
    for at in range(1, 200):
        fault, root = Fault(at, error), tmp_path / str(at)
        try:
            with failpoints.watch(fault):
                make_cache(root)
        except StorageError as refused:
            messages.append(str(refused))
        else:
            if len(fault.seen) < at:
                break
        failed.add(fault.seen[at - 1])
        for commit in root.rglob("commits/*.json"):
            named = from_json(Commit, commit.read_bytes())
            assert fs.sha256_of(root / "data" / named.file) == named.sha256
        assert not list(root.rglob("tmp/run/*"))
        make_cache(root)
        assert tree_of(root) == clean_tree
    assert len(messages) > 60
    assert all(os.strerror(error) in message for message in messages)
    told = error in (errno.ENOSPC, errno.EDQUOT)
    assert all(("Free some space" in message) == told for message in messages)
    assert failed == KINDS


def test_syncing_reaches_the_disk_itself(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    fs.publish(tmp_path / "a", b"x", label="manifest")
    assert synced == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]


def test_a_full_disk_is_reported_with_the_bytes_it_lacks(tmp_path):
    with (
        failpoints.watch(Fault(2, errno.ENOSPC)),
        pytest.raises(StorageError, match=r"3 bytes needed, [\d,]+ free\)\. Free some space"),
    ):
        fs.publish(tmp_path / "a", b"abc", label="manifest")
    assert list(tmp_path.iterdir()) == []


def test_a_fault_inside_the_parquet_writer_keeps_its_own_words(tmp_path):
    with failpoints.watch(Fault(2, errno.EDQUOT)), pytest.raises(StorageError, match="--output"):
        write_shard(tmp_path / "a", block_of(30_000, 0))


def test_a_link_at_the_place_of_a_new_file_is_not_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        fs.create(tmp_path / "link")
    with pytest.raises(StorageError):
        fs.open_lock(tmp_path / "link")
    fs.publish(tmp_path / "link", b"x", label="manifest")
    assert not fs.put_if_absent(tmp_path / "link", b"y", label="commit")
    assert not (tmp_path / "elsewhere").exists()
    assert (tmp_path / "link").read_bytes() == b"x"


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="not a regular file"):
        fs.read_bytes(tmp_path / "pipe")


def test_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        fs.publish(tmp_path / "a", b"x", label="manifest")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_one_of_many_processes_puts_the_file(tmp_path):
    gate, start = os.pipe()

    def race(number):
        os.close(start)
        os.read(gate, 1)
        won = fs.put_if_absent(tmp_path / "commit", str(number).encode(), label="commit")
        (tmp_path / f"{'won' if won else 'lost'}-{number}").touch()

    pids = []
    for number in range(8):
        pid = os.fork()
        if not pid:
            try:
                race(number)
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(start)  # all of them read the end of the pipe at once
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(gate)
    (winner,) = tmp_path.glob("won-*")
    assert (tmp_path / "commit").read_text() == winner.name.removeprefix("won-")
    assert len(list(tmp_path.glob("lost-*"))) == 7
    assert not [path for path in tmp_path.iterdir() if re.search(r"\.tmp$", path.name)]


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (errno.ENOENT, 2, "See that the path is right"),
        (errno.EACCES, 2, "Give this user the right"),
        (errno.EROFS, 2, "is read-only"),
        (errno.EISDIR, 2, "has to be a file"),
        (errno.ENOTDIR, 2, "A part of the path is a file"),
        (errno.ELOOP, 2, "Links are not followed"),
        (errno.ENAMETOOLONG, 2, "a shorter path"),
        (errno.EMFILE, 74, "limit on open files"),
        (errno.ENOSPC, 74, "Free some space"),
        (errno.EIO, 74, "Check the disk"),
    ],
)
def test_each_kind_of_refusal_has_its_own_message(tmp_path, number, code, said):
    error = storage_error("open", tmp_path / "x", OSError(number, os.strerror(number)))
    assert isinstance(error, StorageError)
    assert error.exit_code == code
    assert os.strerror(number) in str(error)
    assert said in str(error)
    assert ("disk" in str(error)) == (number in (errno.EIO,))


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
    assert {path.name for path in tmp_path.iterdir()} == {target.name, mine.name, other.name}
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
