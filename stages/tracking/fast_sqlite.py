"""A new SQLite store in a second instead of six.

MLflow builds one by some 350 statements, and SQLite waits for the disk after each. Nothing is in
the file yet, so while it is built nothing is waited for; from its first run on, all is as usual.
"""

from __future__ import annotations

import importlib
import sqlite3
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "sqlite:///"


@contextmanager
def created_quickly(uri: str) -> Iterator[None]:
    """Wraps the first opening of a store; does nothing for one that is there or not SQLite."""
    path = uri.removeprefix(PREFIX).partition("?")[0]
    if not uri.startswith(PREFIX) or not path or Path(path).exists():
        yield
        return
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
