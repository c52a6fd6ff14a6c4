"""Locks: one owner per output folder.

A lock saves work; it does not protect data. `put_if_absent` commits a unit once, with or without
one.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, Self

from ....schemas.errors import LockedError
from ....schemas.json_codec import CodecError, from_json, to_json
from ..bucket.objects import Location
from . import fs


class Ownable(Protocol):
    """A folder that one process at a time may work in."""

    @property
    def root(self) -> Location:
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


def owner_lock(folder: Ownable, run_id: str) -> OwnerLock:
    """Makes this process the owner of an output folder; LockedError when there is one."""
    lock = try_owner_lock(folder, run_id)
    if lock is None:
        raise LockedError(
            f"{folder.root} is in use by {_owner_of(folder.lock)}. {folder.when_locked}"
        )
    return lock


def try_owner_lock(folder: Ownable, run_id: str) -> OwnerLock | None:
    """Like `owner_lock`, but None when there is an owner."""
    descriptor = fs.open_lock(folder.lock)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    lock = OwnerLock(folder.lock, descriptor)
    lock.sign(run_id)
    return lock


def is_owned(folder: Ownable) -> bool:
    """Whether a process works there now; it is asked without becoming the owner."""
    if not folder.lock.exists():
        return False
    with fs.open_file(folder.lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Held by one thread of one process at a time; the lock of a dead one is released."""
    descriptor = fs.open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class OwnerLock:
    """Held until it is released or the process ends."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        _held.add(descriptor)

    def sign(self, run_id: str) -> None:
        """Writes the owner into the lock file."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        owner = Owner(socket.gethostname(), os.getpid(), run_id, since)
        try:
            fs.rewrite(self._path, self._descriptor, to_json(owner).encode())
        except BaseException:
            self._close()
            raise

    def release(self) -> None:
        """Releases the folder."""
        try:
            fs.rewrite(self._path, self._descriptor, b"")
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _close(self) -> None:
        _held.discard(self._descriptor)
        os.close(self._descriptor)


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    host: str
    pid: int
    run_id: str
    since: str


_held: set[int] = set()


def _close_held() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


# A forked worker must not keep the folder locked after its parent was killed.
os.register_at_fork(after_in_child=_close_held)


def _owner_of(path: Path) -> str:
    try:
        owner = from_json(Owner, fs.read_bytes(path))
    except CodecError:
        return "another process"
    return f"process {owner.pid} on {owner.host} (run {owner.run_id}, since {owner.since})"
