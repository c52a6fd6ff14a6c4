"""Locks: one owner per output folder, who writes into the lock file who it is.

A lock saves work; it does not protect data: what is committed is created if it is absent, with or
without one. The system releases the lock of a process that dies, and a forked child has none.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from ....schemas.errors import LockedError, os_errors_as_storage_errors


class Ownable(Protocol):
    """A folder that one process at a time may work in."""

    @property
    def root(self) -> Path:
        """The folder."""
        ...

    @property
    def lock(self) -> Path:
        """The file whose lock makes a process its owner."""
        ...

    @property
    def when_locked(self) -> str:
        """Advice to a person while another process owns it."""
        ...


@contextmanager
def owner_lock(folder: Ownable, run_id: str) -> Iterator[None]:
    """Makes this process the owner of an output folder; LockedError when there is one."""
    with try_owner_lock(folder, run_id) as is_owner:
        if not is_owner:
            owner = folder.lock.read_text(errors="replace").strip() or "another process"
            raise LockedError(f"{folder.root} is in use by {owner}. {folder.when_locked}")
        yield


@contextmanager
def try_owner_lock(folder: Ownable, run_id: str) -> Iterator[bool]:
    """Like `owner_lock`; yields whether this process is the owner."""
    lock = FileLock(folder.lock, blocking=False, thread_local=False)
    try:
        with os_errors_as_storage_errors("lock", folder.lock), suppress(Timeout):
            lock.acquire()
            since = datetime.now(UTC).isoformat(timespec="seconds")
            who = f"process {os.getpid()} on {socket.gethostname()} (run {run_id}, since {since})"
            folder.lock.write_text(who)
        yield lock.is_locked
    finally:
        lock.release()


def is_owned(folder: Ownable) -> bool:
    """Whether a process works there now; also who may only read the folder can ask."""
    if not folder.lock.exists():
        return False
    with folder.lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Held by one thread of one process at a time; the lock of a dead one is released."""
    lock = FileLock(path, thread_local=False, poll_interval=0.01)
    with os_errors_as_storage_errors("lock", path):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
