"""Digests are made once for a version of a file, and again whenever it may have changed."""

import hashlib
import os
import shutil
import time

import pytest

from align.schemas.errors import CorruptionError
from align.schemas.file_version import SETTLED_NS, FileVersion
from align.stages.storage import digest_memory
from align.stages.storage.digest_memory import DigestMemory, own_digests, user_folder
from align.stages.storage.verify_cache import check_shard
from support.shard_cache import block_of, keep_version, rotting_footers, write_cache


class Home:
    """A user's folder, and how often a digest was made for it."""

    def __init__(self, folder):
        self.folder = folder
        self.made = 0
        self.memory = DigestMemory(folder)

    def digests(self, file):
        """As the next command of this user gets them."""
        return DigestMemory(self.folder)(file, lambda: self.digest(file))

    def digest(self, file):
        self.made += 1
        return [hashlib.sha256(file.read_bytes()).hexdigest()]

    @property
    def lines(self):
        (place,) = (self.folder / "digests").iterdir()
        return place


@pytest.fixture
def own_folder(tmp_path):
    return Home(tmp_path / "home")


@pytest.fixture
def weights(tmp_path, later):
    file = tmp_path / "model" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"a" * 100)
    later(SETTLED_NS)
    return file


@pytest.fixture
def later(monkeypatch):
    """Lets so many nanoseconds pass for those who ask how old a file is."""
    passed = [0]
    now = time.time_ns
    monkeypatch.setattr(digest_memory.time, "time_ns", lambda: now() + passed[0])

    def let_pass(nanoseconds):
        passed[0] += nanoseconds

    return let_pass


def test_the_next_command_is_given_the_digest_that_an_earlier_one_made(own_folder, weights):
    first = own_folder.digests(weights)
    assert own_folder.digests(weights) == first == [hashlib.sha256(b"a" * 100).hexdigest()]
    assert own_folder.made == 1


@pytest.mark.parametrize("change", ["content", "size", "replaced", "restored time", "touched"])
def test_a_file_that_may_have_changed_is_digested_again(own_folder, weights, later, change):
    own_folder.digests(weights)
    found = weights.stat()
    if change == "content":
        weights.write_bytes(b"b" * 100)
    elif change == "size":
        with weights.open("ab") as file:
            file.write(b"a")
        os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    elif change == "replaced":
        shutil.copy2(weights, weights.with_name("other"))
        weights.with_name("other").rename(weights)
    elif change == "restored time":
        weights.write_bytes(b"b" * 100)
        os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    else:
        os.utime(weights)
    later(SETTLED_NS)
    assert own_folder.digests(weights) == [hashlib.sha256(weights.read_bytes()).hexdigest()]
    assert own_folder.made == 2


def test_a_file_changed_just_before_it_was_digested_is_not_remembered(own_folder, tmp_path):
    """It may be changed once more within the same tick of its clock, and keep its time."""
    file = tmp_path / "weights"
    file.write_bytes(b"a")
    own_folder.digests(file)
    own_folder.digests(file)
    assert own_folder.made == 2
    assert not (own_folder.folder / "digests").exists()


@pytest.mark.parametrize(("age_ns", "is_settled"), [(SETTLED_NS, True), (SETTLED_NS - 1, False)])
@pytest.mark.parametrize("which", ["modified_ns", "changed_ns"])
def test_both_times_of_a_file_have_to_be_two_seconds_old(which, age_ns, is_settled):
    now = 10**18
    times = {"modified_ns": now - 10 * SETTLED_NS, "changed_ns": now - 10 * SETTLED_NS}
    version = FileVersion(device=1, inode=2, size=3, **{**times, which: now - age_ns})
    assert version.is_settled(now) == is_settled


def test_a_time_in_the_future_is_not_settled():
    now = 10**18
    assert not FileVersion(1, 2, 3, modified_ns=now + 1, changed_ns=0).is_settled(now)


def test_a_file_that_changes_while_it_is_digested_is_not_remembered(own_folder, weights):
    def digest_and_change():
        digests = own_folder.digest(weights)
        os.utime(weights)
        return digests

    DigestMemory(own_folder.folder)(weights, digest_and_change)
    own_folder.digests(weights)
    assert own_folder.made == 2


def test_no_damaged_line_is_believed(own_folder, weights):
    good = own_folder.digests(weights)
    whole = own_folder.lines.read_bytes()
    for place in range(len(whole)):
        own_folder.lines.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert own_folder.digests(weights) == good
        own_folder.lines.write_bytes(whole[:place])
        assert own_folder.digests(weights) == good


def test_a_line_after_one_that_was_cut_off_counts(own_folder, weights):
    own_folder.digests(weights)
    own_folder.lines.write_bytes(own_folder.lines.read_bytes()[:-30])
    own_folder.digests(weights)
    own_folder.digests(weights)
    assert own_folder.made == 2


def test_folders_of_one_name_are_told_apart(own_folder, weights, tmp_path, later):
    other = tmp_path / "elsewhere" / "model" / weights.name
    other.parent.mkdir(parents=True)
    other.write_bytes(b"c" * 100)
    later(SETTLED_NS)
    assert own_folder.digests(weights) != own_folder.digests(other)
    assert own_folder.digests(weights) != own_folder.digests(other)
    assert own_folder.made == 2


def test_a_home_that_cannot_be_written_costs_one_warning(weights, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    own_folder = Home(tmp_path / "file" / "home")
    assert own_folder.memory(weights, lambda: own_folder.digest(weights)) == own_folder.digest(
        weights
    )
    other = weights.with_name("other")
    shutil.copy(weights, other)
    os.utime(weights)
    own_folder.memory(weights, lambda: own_folder.digest(weights))
    assert caplog.text.count("digests are not remembered") == 1


def test_the_digests_are_where_the_list_of_caches_is(monkeypatch, tmp_path):
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "own"))
    assert user_folder() == tmp_path / "own"
    monkeypatch.delenv("ALIGN_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_folder() == tmp_path / "xdg" / "align"


def test_a_remembered_shard_is_compared_with_its_commit(tmp_path, later):
    folder, manifest = write_cache(tmp_path / "cache", [block_of(20), block_of(20, seed=1)])
    later(SETTLED_NS)
    for shard in manifest.shards:
        check_shard(folder, shard, own_digests())
    first, second = manifest.shards
    first.sha256, first.bytes = second.sha256, second.bytes
    with pytest.raises(CorruptionError, match="unit 0"):
        check_shard(folder, first, own_digests())


def test_a_flipped_bit_in_the_footer_of_a_remembered_shard_is_refused(tmp_path, later, monkeypatch):
    folder, manifest = write_cache(tmp_path / "cache", [block_of(2)])
    (shard,) = manifest.shards
    later(SETTLED_NS)
    keep_version(monkeypatch, folder.shard(shard))
    check_shard(folder, shard, memory := own_digests())
    for _ in rotting_footers(folder.shard(shard), 2000):
        with pytest.raises(CorruptionError, match="is not what was written"):
            check_shard(folder, shard, memory)
    check_shard(folder, shard, memory)


def test_a_line_of_another_format_costs_one_digest(own_folder, weights, monkeypatch):
    monkeypatch.setattr(digest_memory, "FORMAT", 1)
    own_folder.digests(weights)
    monkeypatch.undo()
    own_folder.digests(weights)
    assert own_folder.made == 2
