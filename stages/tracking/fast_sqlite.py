"""A new SQLite store in a second instead of six, and by one process at a time.

MLflow builds one by some 350 statements, and SQLite waits for the disk after each. Nothing is in
the file yet, so while it is built nothing is waited for; from its first run on, all is as usual.
Nor does MLflow keep two processes from building the same file at once, at which both fail.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import sqlite3
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "sqlite:///"
WAIT_SECONDS = 20.0


@contextmanager
def created_quickly(uri: str) -> Iterator[None]:
    """Wraps the first opening of a store; does nothing for one that is there or not SQLite."""
    name = uri.removeprefix(PREFIX).partition("?")[0]
    if not uri.startswith(PREFIX) or not name:
        yield
        return
    with _alone_in(Path(name).parent):
        if Path(name).exists():
            yield
        else:
            with _unsynchronized():
                yield


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keeps others who ask for the same out, as far as the file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # not there yet; MLflow makes it, or says why it cannot
        yield
        return
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Waits for a lock no longer than building a store may take."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return
        else:
            return


@contextmanager
def _unsynchronized() -> Iterator[None]:
    event = importlib.import_module("sqlalchemy.event")
    engine = importlib.import_module("sqlalchemy.engine").Engine
    opened: list[sqlite3.Connection] = []

    def hurry(connection: Any, _record: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            opened.append(connection)
            connection.execute("PRAGMA synchronous=OFF")

    event.listen(engine, "connect", hurry)
    try:
        yield
    finally:
        event.remove(engine, "connect", hurry)
        for connection in opened:
            with suppress(sqlite3.ProgrammingError):  # closed already
                connection.execute("PRAGMA synchronous=FULL")
