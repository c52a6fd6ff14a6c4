"""What is written is there as a whole or not at all, whatever fails: files, folders and units."""

import errno
import os
import signal

import pytest

from align.schemas.cache import Shard
from align.schemas.errors import StorageError, UsageError
from align.schemas.json_codec import from_signed_json
from align.stages.storage.disk import fs
from align.stages.storage.run.run_folder import save_model
from support import disk_faults
from support.made_caches import in_child, make_cache, tree_of


class Fault:
    """Makes the Nth operation fail, and counts them."""

    def __init__(self, at, error=errno.ENOSPC):
        self.at, self.error, self.seen = at, error, 0

    def __call__(self, op):
        self.seen += 1
        if self.seen == self.at:
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_failed_operation_commits_no_half_shard(tmp_path, every):
    """Each of so many, until a run meets no fault: refused with 74, and a rerun converges."""
    make_cache(tmp_path / "clean")
    clean, codes = tree_of(tmp_path / "clean"), []
    for at in range(1, 200, every):
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
    assert len(codes) > 40 / every


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
