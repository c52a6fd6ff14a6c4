"""Creates MLflow's SQLite store atomically.

MLflow runs about 350 statements to create a store. A kill in between would leave a broken store
that MLflow never repairs, so the store is built under a temporary name and then linked to its own.
The temporary store has no data yet, so fsync is off: creation takes one second instead of six.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..storage.disk import fs
from .metrics_log import key_of

_FILE = re.compile(r"(sqlite(?:\+pysqlite)?:///)([^?]+)(.*)", re.DOTALL)
OLD_SECONDS = 600.0  # the process of an older draft was killed


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite URI; None if the URI names no file that we can create."""
    found = _FILE.fullmatch(uri)
    if not found or found[2].startswith((":memory:", "file:")):
        return None
    return Path(found[2])


def with_absolute_path(uri: str) -> str:
    """The URI, with an absolute path in that of SQLite.

    MLflow keeps a store open by its URI, so a relative one would stay that of an earlier folder.
    """
    path = sqlite_file(uri)
    return _FILE.sub(lambda found: f"{found[1]}{path.absolute()}{found[3]}", uri) if path else uri


def make_store(uri: str, build: Callable[[str], object]) -> None:
    """Creates the store of a SQLite URI, unless it exists; `build` gets the URI of a draft."""
    path = sqlite_file(uri)
    if path is None or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f".{path.name}.*.tmp*"):
        if time.time() - old.stat().st_mtime > OLD_SECONDS:
            fs.discard(old)
    event = importlib.import_module("sqlalchemy.event")
    engine = importlib.import_module("sqlalchemy.engine").Engine
    draft, engines = fs.draft_of(path), []

    def disable_fsync(connection: Any) -> None:
        if connection.engine.url.database == str(draft):
            engines.append(connection.engine)
            connection.connection.execute("PRAGMA synchronous=OFF")

    event.listen(engine, "engine_connect", disable_fsync)
    try:
        build(_FILE.sub(lambda found: f"{found[1]}{draft}{found[3]}", uri))
        fs.fsync(draft)
        fs.link(draft, path)  # if another process was first, its store is kept
    finally:
        event.remove(engine, "engine_connect", disable_fsync)
        for one in engines:
            one.dispose()
        fs.discard(draft)
    fs.fsync(path.parent)


def artifacts_beside(uri: str, experiment: str) -> str | None:
    """The artifact folder of a SQLite store, beside its file; None lets MLflow choose.

    MLflow's default depends on the folder from which the first run is started.
    """
    path = sqlite_file(uri)
    return str(path.absolute().parent / "mlruns" / key_of(experiment)) if path else None
