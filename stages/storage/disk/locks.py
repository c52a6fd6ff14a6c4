"""Locks: one owner per output folder; the lock file describes the owner.

A lock saves work but does not protect data: results are created only if absent, with or without a
lock. The system releases the lock of a process that dies, and a forked child has none.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from ....schemas.errors import LockedError, os_errors_as_storage_errors


def lock_of(root: Path) -> Path:
    """The lock file of an output folder."""
    return root / "_align" / "LOCK"


@contextmanager
def owner_lock(root: Path, run_id: str) -> Iterator[None]:
    """Makes this process the owner of an output folder; LockedError if there is another."""
    with try_owner_lock(root, run_id) as is_owner:
        if not is_owner:
            owner = lock_of(root).read_text(errors="replace").strip() or "another process"
            raise LockedError(
                f"{root} is in use by {owner}. Wait for it, or choose another --output."
            )
        yield


@contextmanager
def try_owner_lock(root: Path, run_id: str) -> Iterator[bool]:
    """Like `owner_lock`; yields whether this process is the owner."""
    path = lock_of(root)
    lock = FileLock(path, blocking=False, thread_local=False)
    try:
        with os_errors_as_storage_errors("lock", path), suppress(Timeout):
            lock.acquire()
            since = datetime.now(UTC).isoformat(timespec="seconds")
            who = f"process {os.getpid()} on {socket.gethostname()} (run {run_id}, since {since})"
            path.write_text(who)
        yield lock.is_locked
    finally:
        lock.release()


def is_owned(root: Path) -> bool:
    """Whether a process owns the folder now; read permission is enough to ask."""
    if not lock_of(root).exists():
        return False
    with lock_of(root).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks a file for one thread of one process; the lock of a dead process is released."""
    lock = FileLock(path, thread_local=False, poll_interval=0.01)
    with os_errors_as_storage_errors("lock", path):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
