"""What every store keeps to, tried in an empty folder of it."""

import hashlib
import threading

import pytest

from align.schemas.errors import AlignError, CorruptionError
from align.schemas.file_version import digest_anew
from align.stages.storage.store import store_of

WRITERS, ROUNDS = 12, 10


def at_the_same_time(work):
    """Calls the work in threads that start together, with their numbers."""
    start = threading.Barrier(WRITERS)

    def begin(writer):
        start.wait()
        work(writer)

    threads = [threading.Thread(target=begin, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def require_store_contract(root, drafts):
    """`root` is a folder, or a key, with nothing in it; `drafts` a folder of this machine."""
    store = store_of(root)
    _one_writer_wins(store, root)
    _files_are_written_whole(store, root, drafts)
    _names_are_listed(store, root)
    _bytes_are_compared(store, root, drafts)
    _folders_are_retired_once(store, root)


def _one_writer_wins(store, root):
    """Of those who put a file at the same time; all read the winner's bytes."""
    for number in range(ROUNDS):
        path, won = root / f"race-{number}", []

        def write(writer, path=path, won=won):
            if store.put_if_absent(path, b"%d" % writer):
                won.append(writer)

        at_the_same_time(write)
        assert won == [int(store.read(path))]
        store.remove(path)


def _files_are_written_whole(store, root, drafts):
    path = root / "file"
    assert store.size(path) is None
    with pytest.raises(AlignError):
        store.read(path)
    store.remove(path)  # which is none
    store.replace(path, b"first", known=None)
    store.replace(path, b"the second", known=b"first")
    assert store.read(path) == b"the second"
    assert store.size(path) == 10
    assert not store.put_if_absent(path, b"third")
    draft = drafts / "draft"
    draft.write_bytes(b"installed")
    store.install(draft, path)
    assert store.read(path) == b"installed"
    assert not draft.exists()
    assert store.work_folder(root).is_dir()
    free = store.free_bytes(root)
    assert free is None or free > 0
    store.remove(path)
    assert not path.exists()


def _names_are_listed(store, root):
    folder = root / "names"
    store.make_folder(folder)
    names = [f"part-{number:02}" for number in range(30)]
    for name in reversed(names):
        store.put_if_absent(folder / name, name.encode())
    store.sync_names(folder)
    paths = store.listed(folder)
    assert [path.name for path in paths] == names
    assert folder in store.listed(root)
    assert [*store.each(store.read, paths)] == [name.encode() for name in names]
    store.drop_drafts(folder, names)  # removes nothing that is whole
    store.remove_if_empty(folder)
    assert len(store.listed(folder)) == len(names)
    for path in paths:
        store.remove(path)
    store.remove_if_empty(folder)
    assert not folder.exists()


def _bytes_are_compared(store, root, drafts):
    payload, path = bytes(range(256)) * 50, root / "shard"
    sha256, size = hashlib.sha256(payload).hexdigest(), len(payload)
    (drafts / "shard").write_bytes(payload)
    store.install(drafts / "shard", path)
    pinned = store.pinned(path, sha256, size)
    assert [*store.ahead([pinned])] == [pinned]
    assert store.local(pinned).read_bytes() == payload
    with store.open(pinned) as source:
        assert source.read() == payload
    for measure in (store.measure, store.measure_read):
        assert measure(pinned, size, digest_anew) == (size, sha256)
    store.replace(path, payload[::-1], known=payload)
    assert store.measure(pinned, size, digest_anew)[1] != sha256
    store.remove(path)
    with pytest.raises(CorruptionError):
        store.measure(pinned, size, digest_anew)


def _folders_are_retired_once(store, root):
    work = root / "work"
    store.make_folder(work)
    for name in ("plan", "one", "two"):
        store.put_if_absent(work / name, b"")
    assert [store.retire(work, first="plan") for _ in range(2)] == [True, False]
    assert not work.exists()
