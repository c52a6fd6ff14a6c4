"""A SQLite store of MLflow is whole or not there.

One that is not there yet is built under a draft's name, then given its own in one step. MLflow
builds one by some 350 statements, and a kill among them would leave a store that neither works nor
is ever repaired. Nothing is in a draft, so SQLite need not wait for the disk after each statement:
a second instead of six. A store that is there is never touched.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...schemas.errors import StorageError
from ..storage.disk import fs
from .journal import key_of

WAIT_SECONDS = 20.0
_FILE = re.compile(r"(sqlite(?:\+pysqlite)?:///)([^?]+)(.*)", re.DOTALL)


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite address; None where it names no file that we could make."""
    found = _FILE.fullmatch(uri)
    if not found or found[2].startswith((":memory:", "file:")):
        return None
    return Path(found[2])


def make_store(uri: str, build: Callable[[str], object]) -> None:
    """Lets `build` make the store of a SQLite address under another one, unless it is there."""
    path = sqlite_file(uri)
    if path is None or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(path.parent) as is_alone:
        if path.exists():
            return
        if is_alone:
            _remove_drafts(path)
        draft = fs.draft_of(path)
        try:
            with _unsynchronized():
                build(_FILE.sub(lambda found: f"{found[1]}{draft}{found[3]}", uri))
            fs.fsync(draft)
            fs.link(draft, path)  # if another was first, its file is kept
        finally:
            fs.discard(draft)
        fs.fsync(path.parent)


def require_whole(uri: str, error: Exception) -> None:
    """Says what to do with a SQLite store that MLflow cannot open for how it was made."""
    path = sqlite_file(uri)
    if path is None or (runs := _count_runs(path)) is None:
        return
    if runs:
        way = (
            f"It holds {runs:,} runs of another version of MLflow: keep a copy of it, then "
            f"`mlflow db upgrade {uri}`"
        )
    else:
        way = "It holds no run and was left half made. If no other program is making it, remove it"
    raise StorageError(f"{path} is not a whole store of this MLflow. {way}.") from error


def _count_runs(path: Path) -> int | None:
    """The number of runs in a store, whole or not; None where the file is no database."""
    try:
        with path.open("rb") as source:
            source.read(1)
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    except (OSError, sqlite3.Error):
        return None
    try:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if "runs" not in tables:
            return 0
        return int(database.execute("SELECT count(*) FROM runs").fetchone()[0])
    except sqlite3.Error:
        return None
    finally:
        database.close()


def _remove_drafts(path: Path) -> None:
    """Removes what a killed process left; the caller holds the lock."""
    for draft in path.parent.glob(f".{path.name}.*.tmp*"):
        if re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp(-journal)?", draft.name):
            fs.unlink(draft)


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Keeps others who ask for the same out, as far as the file system can; whether it does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Waits for a lock no longer than building a store may take."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return False
        else:
            return True
    return False


@contextmanager
def _unsynchronized() -> Iterator[None]:
    """Connections opened inside do not wait for the disk; they are closed at its end."""
    event = importlib.import_module("sqlalchemy.event")
    engine = importlib.import_module("sqlalchemy.engine").Engine
    used: list[Any] = []

    def disable_fsync(connection: Any, _record: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")

    def note(connection: Any) -> None:
        used.append(connection.engine)

    event.listen(engine, "connect", disable_fsync)
    event.listen(engine, "engine_connect", note)
    try:
        yield
    finally:
        event.remove(engine, "connect", disable_fsync)
        event.remove(engine, "engine_connect", note)
        for one in used:
            with suppress(sqlite3.Error):
                one.dispose()


def artifacts_beside(uri: str, experiment: str) -> str | None:
    """The artifact folder of a SQLite store: beside its file, from any working folder.

    MLflow would put it below the folder that the first run is started from. None: it decides.
    """
    name = uri.removeprefix("sqlite:///").partition("?")[0]
    if not uri.startswith("sqlite:///") or not name:
        return None
    return str(Path(name).absolute().parent / "mlruns" / key_of(experiment))
