"""File system operations; no other module of this folder changes the disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ....schemas.errors import AlignError, StorageError, UsageError, os_errors_as_storage_errors
from .failpoints import operate, reach

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def publish(path: Path, payload: bytes, *, label: str) -> None:
    """Writes a whole file, in place of any other of this name."""
    with _drafted(path, payload) as draft:
        reach(f"{label}.before_rename")
        rename(draft, path)
    reach(f"{label}.after_rename")
    fsync_folder(path.parent)


def put_if_absent(path: Path, payload: bytes, *, label: str) -> bool:
    """Writes a whole file unless there is one; returns whether it did."""
    with _drafted(path, payload) as draft:
        reach(f"{label}.before_link")
        won = link(draft, path)
    reach(f"{label}.after_link")
    unlink(draft)
    # Also if another was first: work built on its file must not outlive it in a power loss.
    fsync_folder(path.parent)
    return won


@contextmanager
def new_file(path: Path, *, replaces: bool) -> Iterator[io.BufferedWriter]:
    """A file to write into, which becomes `path` at the end of the block, whole and durable.

    Unless it replaces, a file that exists is an error.
    """
    drop_drafts(path)
    with locked_draft(path) as (draft, sink):
        yield sink
        sink.flush()
        fsync(draft)
        if replaces:
            rename(draft, path)
        elif not link(draft, path):
            raise UsageError(f"{path} exists. Move it, or name another file.")
    if not replaces:
        unlink(draft)
    fsync_folder(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` at the end of the block, unless `path` has content."""
    with draft_folder(path) as draft:
        yield draft
        rename(draft, path)


@contextmanager
def draft_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which goes at the end of the block unless the block has moved it."""
    drop_drafts(path)
    draft = _draft_of(path)
    make_folder(draft)
    descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor)
        yield draft
    finally:
        os.close(descriptor)
        with suppress(AlignError):
            remove_tree(draft)


@contextmanager
def locked_draft(path: Path) -> Iterator[tuple[Path, io.BufferedWriter]]:
    """A draft of a file to write into and rename, locked while its writer lives."""
    draft = _draft_of(path)
    with _locked(draft) as sink:
        yield draft, sink


def drop_drafts(path: Path) -> None:
    """Removes the drafts of a file or folder whose writers have died: those that are not locked."""
    _drop(path.parent, re.escape(path.name))


def drop_all_drafts(folder: Path) -> None:
    """Removes those of every file in a folder."""
    _drop(folder, ".+")


def _drop(parent: Path, drafted: str) -> None:
    name = re.compile(rf"\.{drafted}\.[0-9a-f]{{16}}\.tmp")
    for draft in sorted(parent.iterdir()) if os.access(parent, os.R_OK) and parent.is_dir() else []:
        # One without content may not be locked yet, and if we locked it its writer could not.
        if name.fullmatch(draft.name) and _has_content(draft):
            with if_unlocked(draft) as is_dead:
                if is_dead:
                    (remove_tree if draft.is_dir() else unlink)(draft)


def _has_content(draft: Path) -> bool:
    with suppress(OSError):
        return any(draft.iterdir()) if draft.is_dir() else draft.stat().st_size > 0
    return False


@contextmanager
def if_unlocked(path: Path) -> Iterator[bool]:
    """Whether a file or folder is there and not locked; nobody can lock it during the block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def draft_if_absent(path: Path) -> Iterator[Path]:
    """A name to write under; the file there becomes `path` at the end of the block.

    If another was first, its file is kept.
    """
    draft = _draft_of(path)
    try:
        yield draft
        _put(draft, path)
    except BaseException:
        discard(draft)
        raise
    unlink(draft)
    fsync_folder(path.parent)


def _put(draft: Path, path: Path) -> None:
    try:
        link(draft, path)
    except StorageError:  # a file system without hard links
        if path.exists():
            raise
        rename(draft, path)


def sha256_of(path: Path) -> str:
    """The digest of a file's bytes."""
    with open_file(path) as source, os_errors_as_storage_errors("read", path):
        return hashlib.file_digest(source, "sha256").hexdigest()


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    with open_file(path) as source, os_errors_as_storage_errors("read", path):
        return source.read()


def open_file(path: Path) -> io.BufferedReader:
    """Opens a file for reading."""
    with os_errors_as_storage_errors("open", path):
        return path.open("rb")


def create(path: Path) -> io.BufferedWriter:
    """A new file to write into; an existing file is refused."""
    descriptor = operate("create", path, lambda: os.open(path, _NEW, 0o666))
    return io.BufferedWriter(_Sink(path, descriptor), buffer_size=1 << 20)


def append(path: Path) -> io.BufferedWriter:
    """A file to append to, made if it is missing."""
    descriptor = operate("append", path, lambda: os.open(path, _APPEND, 0o666))
    return io.BufferedWriter(_Sink(path, descriptor))


def write_new(path: Path, payload: bytes) -> None:
    """A new file with all its bytes durable; its name is durable once its folder is synced."""
    with create(path) as sink:
        sink.write(payload)
    fsync(path)


def fsync(path: Path) -> None:
    """Makes the bytes of a file durable."""
    operate("fsync", path, lambda: _sync(path, os.O_RDONLY))


def touch(path: Path) -> None:
    """Gives a file the time of now; an empty one is made if it is missing."""
    operate("touch", path, path.touch)


def fsync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    operate("fsync_folder", path, lambda: _sync(path, os.O_RDONLY | os.O_DIRECTORY))


def rename(path: Path, target: Path) -> None:
    """Moves a file or folder over its new name in one step."""
    operate("rename", path, lambda: path.rename(target), target=target)


def link(path: Path, target: Path) -> bool:
    """Gives a file a second name; False when the name is taken."""
    try:
        operate("link", path, lambda: os.link(path, target), target=target)
    except StorageError as error:
        if isinstance(error.__cause__, FileExistsError):
            return False
        raise
    return True


def unlink(path: Path) -> None:
    """Removes a file, if it exists."""
    operate("unlink", path, lambda: path.unlink(missing_ok=True))


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes one folder, unless it exists."""
    operate("make_folder", path, lambda: path.mkdir(mode, exist_ok=True))


def share(folder: Path) -> None:
    """Gives all files in a folder the permissions of a new one; some libraries hide theirs."""
    usual = folder / f".{secrets.token_hex(8)}.tmp"
    with create(usual) as sink:
        mode = stat.S_IMODE(os.fstat(sink.fileno()).st_mode)
    unlink(usual)
    for path in folder.rglob("*"):
        if path.is_file():
            with os_errors_as_storage_errors("share", path):
                path.chmod(mode)


def remove_folder(path: Path) -> None:
    """Removes a folder if it is empty."""
    try:
        operate("remove_folder", path, path.rmdir)
    except StorageError as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno in (errno.ENOTEMPTY, errno.ENOENT)):
            raise


def remove_tree(path: Path) -> None:
    """Removes a folder with everything in it, if it exists; links are not followed."""

    def remove() -> None:
        while path.exists() or path.is_symlink():
            with suppress(FileNotFoundError):  # another process removes it too
                if path.is_symlink():
                    path.unlink()
                else:
                    shutil.rmtree(path)

    operate("remove_tree", path, remove)


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, made if it is missing."""
    return operate("open_lock", path, lambda: os.open(path, _LOCK, 0o666))


def rewrite(path: Path, descriptor: int, payload: bytes) -> None:
    """Replaces the content of an open lock file."""

    def replace() -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, payload, 0)

    operate("rewrite", path, replace, payload=payload)


def free_bytes(path: Path) -> int:
    """The space on a folder's disk that this process may use, in bytes."""
    with os_errors_as_storage_errors("free_bytes", path):
        state = os.statvfs(path)
        return state.f_bavail * state.f_frsize


def discard(path: Path) -> None:
    """Removes a draft if the disk allows it; for use while another error is raised."""
    with suppress(AlignError):
        unlink(path)


@contextmanager
def _drafted(path: Path, payload: bytes) -> Iterator[Path]:
    """A durable draft of a file, which the block renames."""
    draft = _draft_of(path)
    with _locked(draft) as sink:
        sink.write(payload)
        sink.flush()
        fsync(draft)
        yield draft


@contextmanager
def _locked(draft: Path) -> Iterator[io.BufferedWriter]:
    """A new file, locked while its writer lives; removed if the block fails."""
    try:
        with create(draft) as sink:
            _lock(sink.fileno())
            yield sink
    except BaseException:
        discard(draft)
        raise


def _lock(descriptor: int) -> bool:
    with suppress(OSError):  # a file system without locks, where no draft counts as dead
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Sink(io.RawIOBase):
    """A descriptor whose writes `watch` sees."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, payload: ReadableBuffer, /) -> int:
        view = memoryview(payload)
        return operate("write", self._path, lambda: os.write(self._descriptor, view), payload=view)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)
