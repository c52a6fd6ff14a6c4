"""Digests are made once for a version of a file, and again whenever it may have changed."""

import hashlib
import os
import shutil
import time

import pytest

from align.schemas.errors import CorruptionError
from align.stages.storage.disk import digests
from align.stages.storage.disk.digests import SETTLED_NS, own_digests, remembered
from support.shard_cache import block_of, write_cache


class Home:
    """A user's folder, and how often a digest was made for it."""

    def __init__(self, folder):
        self.folder = folder
        self.made = 0

    def digests(self, file):
        """As the next command of this user gets them."""
        return remembered(self.folder, file, lambda: self.digest(file))

    def digest(self, file):
        self.made += 1
        return [hashlib.sha256(file.read_bytes()).hexdigest()]


@pytest.fixture
def own_folder(tmp_path):
    return Home(tmp_path / "home")


@pytest.fixture
def later(monkeypatch):
    """Lets so many nanoseconds pass for those who ask how old a file is."""
    passed = [0]
    now = time.time_ns
    monkeypatch.setattr(digests.time, "time_ns", lambda: now() + passed[0])

    def let_pass(nanoseconds):
        passed[0] += nanoseconds

    return let_pass


@pytest.fixture
def weights(tmp_path, later):
    file = tmp_path / "model" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"a" * 100)
    later(SETTLED_NS)
    return file


def rewritten(file):
    file.write_bytes(b"b" * 100)


def set_back(file):
    found = file.stat()
    rewritten(file)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def replaced(file):
    shutil.copy2(file, file.with_name("other"))
    file.with_name("other").rename(file)


@pytest.mark.parametrize("change", [rewritten, set_back, replaced, os.utime])
def test_a_file_is_digested_once_until_it_may_have_changed(own_folder, weights, later, change):
    first = own_folder.digests(weights)
    assert own_folder.digests(weights) == first == [hashlib.sha256(b"a" * 100).hexdigest()]
    assert own_folder.made == 1
    twin = weights.parent / "elsewhere" / weights.parent.name / weights.name
    twin.parent.mkdir(parents=True)
    twin.write_bytes(b"c" * 100)
    assert own_folder.digests(twin) != first
    change(weights)
    later(SETTLED_NS)
    assert own_folder.digests(weights) == [hashlib.sha256(weights.read_bytes()).hexdigest()]
    assert own_folder.made == 3


def test_both_times_of_a_file_have_to_be_two_seconds_old(own_folder, tmp_path, later):
    new, now = tmp_path / "new", time.time_ns()
    new.write_bytes(b"a")
    later(SETTLED_NS // 2)
    for age_ns in (10 * SETTLED_NS, -10 * SETTLED_NS):  # with a new ctime; with a future mtime
        os.utime(new, ns=(now, now - age_ns))
        made = own_folder.made
        for _ in range(2):
            own_folder.digests(new)
        assert own_folder.made == made + 2
        later(SETTLED_NS)
    later(10 * SETTLED_NS)
    made = own_folder.made
    for _ in range(2):
        own_folder.digests(new)
    assert own_folder.made == made + 1


def test_a_file_that_changes_while_it_is_digested_is_not_remembered(own_folder, weights):
    def digest_and_change():
        os.utime(weights)
        return own_folder.digest(weights)

    remembered(own_folder.folder, weights, digest_and_change)
    own_folder.digests(weights)
    assert own_folder.made == 2


def test_a_home_that_cannot_be_written_costs_one_warning(weights, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    own_folder = Home(tmp_path / "file" / "home")
    for _ in range(2):
        assert own_folder.digests(weights) == own_folder.digest(weights)
    assert [str(own_folder.folder) in one.getMessage() for one in caplog.records] == [True]


def test_a_remembered_shard_is_compared_with_its_commit(tmp_path, later):
    folder, manifest = write_cache(tmp_path / "cache", [block_of(20), block_of(20, seed=1)])
    later(SETTLED_NS)
    for shard in manifest.shards:
        folder.check(shard, own_digests())
    first, second = manifest.shards
    first.sha256, first.bytes = second.sha256, second.bytes
    with pytest.raises(CorruptionError, match="part-00000000"):
        folder.check(first, own_digests())
