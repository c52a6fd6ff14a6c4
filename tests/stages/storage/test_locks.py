import os
import signal

import pytest

from align.schemas.errors import LockedError
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.locks import owner_lock, try_owner_lock


@pytest.fixture(name="cache_folder")
def _cache_folder(tmp_path):
    folder = CacheFolder(tmp_path / "out")
    folder.prepare()
    return folder


class Holder:
    """Another process that takes something, says so, and keeps it until told to go."""

    def __init__(self, take):
        told, tell = os.pipe()
        stay, self._go = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(self._go)
                kept = take()
                os.write(tell, b"1" if kept else b"0")
                os.read(stay, 1)
            finally:
                os._exit(0)
        os.close(tell)
        os.close(stay)
        self.took = os.read(told, 1) == b"1"
        os.close(told)

    def leave(self, how=signal.SIGKILL):
        os.kill(self.pid, how)
        os.waitpid(self.pid, 0)
        os.close(self._go)


def test_a_second_owner_is_refused_with_the_name_of_the_first(cache_folder):
    holder = Holder(lambda: owner_lock(cache_folder, "early-run"))
    with pytest.raises(LockedError, match=rf"process {holder.pid} on .*early-run.*Wait for it"):
        owner_lock(cache_folder, "late-run")
    assert try_owner_lock(cache_folder, "late-run") is None
    holder.leave()
    with owner_lock(cache_folder, "late-run"):
        assert "late-run" in cache_folder.lock.read_text()
    assert cache_folder.lock.read_bytes() == b""


def test_a_dead_owners_name_in_the_file_locks_nothing(cache_folder):
    cache_folder.lock.write_text('{"host":"here","pid":1}')
    with owner_lock(cache_folder, "run"):
        pass


def test_an_unreadable_lock_file_still_gives_a_clear_refusal(cache_folder):
    with owner_lock(cache_folder, "run"):
        cache_folder.lock.write_text("scribble")
        with pytest.raises(LockedError, match="in use by another process"):
            owner_lock(cache_folder, "other")


def test_a_forked_worker_does_not_keep_the_folder_after_its_owner(cache_folder):
    lock = owner_lock(cache_folder, "run")
    worker = Holder(lambda: True)
    lock.release()
    owner_lock(cache_folder, "next").release()
    worker.leave()
