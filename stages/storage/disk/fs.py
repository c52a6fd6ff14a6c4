"""Atomic writes of files and folders: each is complete under its name, or missing.

A new file is first a draft, a hidden file beside its target, which is locked while its writer
lives, so that `drop_drafts` removes only drafts of dead writers. A draft is synced before it gets
its name, and its folder afterwards. A StorageError names the failed operation, the path and the
reason.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ....schemas.errors import AlignError, UsageError
from ....schemas.errors import os_errors_as_storage_errors as os_errors

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # of a file system without hard links


def publish(path: Path, payload: bytes) -> None:
    """Writes a whole file, replacing any other of this name."""
    with locked_draft(path, len(payload)) as (draft, sink):
        sink.write(payload)
        _sync(sink, draft)
        rename(draft, path)
    fsync(path.parent)


def put_if_absent(path: Path, payload: bytes) -> bool:
    """Writes a whole file unless there is one; returns whether it did."""
    with locked_draft(path, len(payload)) as (draft, sink):
        sink.write(payload)
        _sync(sink, draft)
        won = link(draft, path)
    # Also if another process was first: work based on its file must not outlive the file.
    fsync(path.parent)
    return won


@contextmanager
def new_file(path: Path, *, replaces: bool) -> Iterator[io.BufferedWriter]:
    """A file to write into, which becomes `path`, durably, at the end of the block.

    An existing file is an error unless `replaces` is set.
    """
    drop_drafts(path)
    with locked_draft(path) as (draft, sink):
        yield sink
        _sync(sink, draft)
        if replaces:
            rename(draft, path)
        elif not link(draft, path):
            raise UsageError(f"{path} exists. Move it, or name another file.")
    fsync(path.parent)


# Drafts


def draft_of(path: Path) -> Path:
    """A free name for a draft of a file or folder."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


@contextmanager
def locked_draft(path: Path, needed: int = 0) -> Iterator[tuple[Path, io.BufferedWriter]]:
    """A locked draft of a file, to write into and rename or link; removed after the block."""
    draft = draft_of(path)
    try:
        with create(draft, needed) as sink:
            _lock(sink.fileno())
            yield draft, sink
    except BaseException:
        discard(draft)
        raise
    if draft.exists():
        unlink(draft)


def _sync(sink: io.BufferedWriter, draft: Path) -> None:
    sink.flush()
    fsync(draft)


def drop_drafts(path: Path) -> None:
    """Removes the unlocked drafts of a file, whose writers have died."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")
    for draft in sorted(path.parent.glob(".*.tmp")):
        with suppress(FileNotFoundError):
            # The writer of an empty draft may be about to lock it: it is left alone.
            if name.fullmatch(draft.name) and draft.is_file() and draft.stat().st_size:
                with draft.open("rb") as file:
                    if _lock(file.fileno()):
                        unlink(draft)


def _lock(descriptor: int) -> bool:
    with suppress(OSError):  # on a file system without locks, no draft counts as dead
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


# Single operations


@contextmanager
def create(path: Path, needed: int = 0) -> Iterator[io.BufferedWriter]:
    """A new file to write into; an existing file is refused."""
    with os_errors("write", path, needed), path.open("xb") as sink:
        yield sink


def open_file(path: Path) -> io.BufferedReader:
    """Opens a file for reading."""
    with os_errors("open", path):
        return path.open("rb")


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    with os_errors("read", path):
        return path.read_bytes()


def sha256_of(path: Path) -> str:
    """The digest of a file's bytes."""
    with open_file(path) as source, os_errors("read", path):
        return hashlib.file_digest(source, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Makes the bytes of a file, or the names in a folder, durable."""
    with os_errors("fsync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_new(path: Path, payload: bytes) -> None:
    """Writes a new file durably; its name is durable once its folder is synced."""
    with create(path, len(payload)) as sink:
        sink.write(payload)
    fsync(path)


def rename(path: Path, target: Path) -> None:
    """Moves a file or folder over its new name in one step."""
    with os_errors("rename", path):
        path.rename(target)


def link(path: Path, target: Path) -> bool:
    """Gives a file a second name; False when the name is taken."""
    with os_errors("link", path):
        try:
            os.link(path, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if target.exists():
                return False
            path.rename(target)
    return True


def unlink(path: Path) -> None:
    """Removes a file, if it exists."""
    with os_errors("unlink", path):
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Removes a draft and ignores errors; for use while another error is raised."""
    with suppress(AlignError):
        unlink(path)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes one folder, unless it exists."""
    with os_errors("make_folder", path):
        path.mkdir(mode, exist_ok=True)


def remove_tree(path: Path) -> None:
    """Removes a folder with everything in it, if it exists; links are not followed."""
    with os_errors("remove_tree", path):
        while path.exists() or path.is_symlink():
            with suppress(FileNotFoundError):  # another process removed it
                if path.is_symlink():
                    path.unlink()
                else:
                    shutil.rmtree(path)


def free_bytes(path: Path) -> int:
    """The space on a folder's disk that this process may use, in bytes."""
    with os_errors("free_bytes", path):
        return shutil.disk_usage(path).free
