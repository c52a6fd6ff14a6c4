"""Local copies of objects: bounded, checked as they arrive, shared by all processes of a machine.

shards/<sha256>                files of caches, named by their content
used/<name>                    touched by each use of a copy, whose own times stay as they are
work/<key>/                    what a command keeps on a disk while its output is in a store

What was used longest ago is removed to make room. A file that is open can still be read then.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ....schemas.errors import CorruptionError, StorageError, UsageError, damaged
from ....schemas.file_version import Remember, digest_anew
from ....schemas.json_codec import digest
from ..disk import fs
from ..disk.digests import remembered_sha256, user_folder
from ..disk.locks import held
from . import objects
from .buckets import Version
from .objects import ObjectPath

logger = logging.getLogger("align")

GIB = 1 << 30
FETCHED_AHEAD = 4  # files
ROOM_LOCK = ".room.lock"
WAIT = 0.05  # seconds
_REMEDY = "Restore it from a copy, or make it again."


@dataclass(frozen=True)
class CopyFolder:
    """Where copies are on this machine, and how many bytes they may have."""

    root: Path
    limit: int

    @property
    def shards(self) -> Path:
        """Files, named by their digest."""
        return self.root / "shards"

    @property
    def used(self) -> Path:
        """An empty file for each copy, as old as the last use of that."""
        return self.root / "used"

    def prepare(self) -> None:
        """Makes the folders; what they hold may be private."""
        above = [path for path in self.root.parents if not path.exists()]
        for path in (*reversed(above), self.root):
            fs.make_folder(path, 0o700)
        for path in (self.shards, self.used, self.root / "work"):
            fs.make_folder(path, 0o700)


_chosen: list[tuple[str, float]] = []


def keep_copies_in(folder: str, gib: float) -> None:
    """Sets where this process keeps copies, and their limit."""
    _chosen[:] = [(folder, gib)]


def copies_here() -> CopyFolder:
    """Where this process keeps copies."""
    folder, gib = _chosen[0] if _chosen else ("", DEFAULT_GIB)
    return CopyFolder(
        Path(folder).absolute() if folder else user_folder() / "objects", int(gib * GIB)
    )


DEFAULT_GIB = 64.0


def work_folder(root: ObjectPath) -> Path:
    """Where a command keeps what needs a disk while its output is in a store."""
    here = copies_here()
    here.prepare()
    folder = here.root / "work" / digest(str(root))[:16]
    for path in (folder, folder / "_align"):
        fs.make_folder(path, 0o700)
    return folder


def open_copy(path: ObjectPath) -> io.BufferedReader:
    """Opens an object's copy, which is fetched if it is not there."""
    while True:
        copy = copy_of(path)
        try:
            source = fs.open_file(copy)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue  # another process has made room since
            raise
        fs.touch(copies_here().used / copy.name)
        return source


def copy_of(path: ObjectPath) -> Path:
    """The path of an object's copy, fetched if it is not there; it stays while there is room."""
    copy = _path_of_copy(path)
    if not copy.exists():
        _fetch_once(path, copy)
    return copy


def fetched_ahead(paths: Iterable[ObjectPath]) -> Iterator[ObjectPath]:
    """Yields the paths in order; the next few are fetched meanwhile."""
    waiting: deque[tuple[ObjectPath, Future[Path]]] = deque()
    with ThreadPoolExecutor(FETCHED_AHEAD, "align-fetch") as pool:
        for path in paths:
            waiting.append((path, pool.submit(copy_of, path)))
            if len(waiting) > FETCHED_AHEAD:
                yield _done(waiting)
        while waiting:
            yield _done(waiting)


def _done(waiting: deque[tuple[ObjectPath, Future[Path]]]) -> ObjectPath:
    path, fetching = waiting.popleft()
    fetching.result()
    return path


def check_copy(path: ObjectPath, remember: Remember = digest_anew) -> None:
    """Removes a copy that is not what arrived: a disk can damage it."""
    copy = _path_of_copy(path)
    with suppress(StorageError, FileNotFoundError):
        if remembered_sha256(copy, remember) != path.sha256:
            logger.warning("%s, the copy of %s, is damaged: it is fetched again.", copy, path)
            fs.unlink(copy)
    copy_of(path)


def _path_of_copy(path: ObjectPath) -> Path:
    assert path.sha256, f"{path}: only objects whose digest is known have copies"
    return copies_here().shards / path.sha256


def _fetch_once(path: ObjectPath, copy: Path) -> None:
    """Fetches an object, unless another process does so meanwhile; a wrong one once again."""
    here = copies_here()
    here.prepare()
    with held(here.root / f".fetch-{path.sha256[:2]}.lock"):
        if copy.exists():
            return
        try:
            _fetch(path, copy, here)
        except CorruptionError as error:
            logger.warning("%s It is fetched again.", error)
            _fetch(path, copy, here)


def _fetch(path: ObjectPath, copy: Path, here: CopyFolder) -> None:
    with _room(here, path.bytes), fs.new_file(copy, replaces=True) as sink:
        receive(path, sink)


def receive(path: ObjectPath, sink: io.BufferedWriter) -> None:
    """Writes an object's bytes to a file; CorruptionError if they are not those it has to hold."""
    version = _version_of(path)
    if path.bytes != version.size:
        raise damaged(path, f"it has {version.size} bytes, not {path.bytes}", _REMEDY)
    if _sha256_of(path, version, sink.write) != path.sha256:
        raise damaged(path, "it is not what was written (sha256 differs)", _REMEDY)


def sha256_of(path: ObjectPath) -> tuple[int, str]:
    """The length and the digest of an object's own bytes, whatever copies there are."""
    version = _version_of(path)
    return version.size, _sha256_of(path, version, lambda _: None)


def _version_of(path: ObjectPath) -> Version:
    version = objects.version_of(path)
    if version is None:
        raise CorruptionError(f"{path} is missing. {_REMEDY}")
    return version


def _sha256_of(path: ObjectPath, version: Version, take: Callable[[bytes], object]) -> str:
    """The digest of an object's bytes, each chunk of which is handed on."""
    sha256 = hashlib.sha256()
    for chunk in objects.read_chunks(path, version):
        sha256.update(chunk)
        take(chunk)
    return sha256.hexdigest()


@contextmanager
def _room(here: CopyFolder, needed: int) -> Iterator[None]:
    """Reserves so many bytes of the limit while the block fills them."""
    reserved = here.root / f".reserved-{os.getpid()}-{os.urandom(4).hex()}"
    while (descriptor := _reserve(here, needed, reserved)) is None:
        time.sleep(WAIT)  # for another fetch, whose copy can then be removed
    try:
        yield
    finally:
        fs.unlink(reserved)
        os.close(descriptor)


def _reserve(here: CopyFolder, needed: int, reserved: Path) -> int | None:
    """A descriptor of the locked reservation; None if room is only held by other fetches."""
    with held(here.root / ROOM_LOCK):
        if not _make_room(here, needed):
            return None
        descriptor = fs.open_lock(reserved)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        fs.rewrite(reserved, descriptor, str(needed).encode())
        return descriptor


def _make_room(here: CopyFolder, needed: int) -> bool:
    """Removes what was used longest ago until there is room under the limit and on the disk.

    False if there will be room once other fetches are done.
    """
    taken = _reserved(here)
    entries = sorted(_entries(here), key=lambda entry: entry.used)
    held = sum(entry.bytes for entry in entries)
    while entries and (taken + held + needed > here.limit or _is_full(here, taken + needed)):
        oldest = entries.pop(0)
        fs.unlink(oldest.path)
        fs.unlink(here.used / oldest.path.name)
        held -= oldest.bytes
    if held + needed > here.limit:
        raise UsageError(
            f"{here.root}: {needed:,} bytes more are needed for local copies of objects, "
            f"{held:,} are in use, and the limit is {here.limit:,}. Raise objects.local_gib."
        )
    if _is_full(here, needed):
        raise StorageError(
            f"{here.root}: {needed:,} bytes are needed for local copies of objects and "
            f"{fs.free_bytes(here.root):,} are free. Make room, or set objects.folder."
        )
    return taken + held + needed <= here.limit and not _is_full(here, taken + needed)


def _is_full(here: CopyFolder, needed: int) -> bool:
    return fs.free_bytes(here.root) < needed


def _reserved(here: CopyFolder) -> int:
    """Bytes reserved by other fetches; reservations of dead processes are removed."""
    total = 0
    for path in here.root.glob(".reserved-*"):
        with fs.if_unlocked(path) as is_left:
            if is_left:
                fs.unlink(path)
        with suppress(StorageError, ValueError):
            total += int(fs.read_bytes(path))
    return total


@dataclass(frozen=True)
class _Entry:
    path: Path
    used: int
    bytes: int


def _entries(here: CopyFolder) -> Iterator[_Entry]:
    """Every whole copy; drafts of dead processes are removed, living ones have reserved room."""
    for path in here.shards.iterdir():
        with suppress(FileNotFoundError):
            if path.name.endswith(".tmp"):
                fs.drop_drafts(path.with_name(path.name[1:-21]))
            elif not path.name.startswith("."):
                used = here.used / path.name
                since = used if used.exists() else path
                yield _Entry(path, since.stat().st_mtime_ns, path.stat().st_size)
