"""File operations of a cache, on a disk or in an object store.

On a disk all of it is done by `fs`. An object is written whole, by one request, and is durable
then; there are no folders, and the order of the requests is the order in which others see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from . import fs, objects
from .failpoints import reach
from .objects import Location, ObjectPath

T = TypeVar("T")

AT_ONCE = 16  # requests to a store


def put_if_absent(path: Location, payload: bytes, *, label: str) -> bool:
    """Writes a whole file unless there is one; returns whether it did.

    An object with these very bytes counts as written: the answer to a request may have been lost.
    """
    if isinstance(path, Path):
        return fs.put_if_absent(path, payload, label=label)
    reach(f"{label}.before_link")
    won = objects.put_new(path, payload)
    reach(f"{label}.after_link")
    return won


def replace_known(
    path: Location,
    payload: bytes,
    *,
    known: bytes | None,
    label: str,
    draft_in: Location | None = None,
) -> None:
    """Writes a whole file in place of one with known bytes, or of none.

    Of two that replace one object with different ones the second is refused. A file's draft is in
    the folder `draft_in`, without which it gets no name.
    """
    if isinstance(path, Path):
        folder = draft_in if isinstance(draft_in, Path) else None
        fs.publish(path, payload, label=label, draft_in=folder)
        return
    reach(f"{label}.before_rename")
    objects.put_over(path, payload, expected=known)
    reach(f"{label}.after_rename")


def install(draft: Path, target: Location) -> None:
    """Gives a durable draft its name, which is made of its content; in a store, by an upload."""
    if isinstance(target, Path):
        fs.rename(draft, target)
        return
    objects.put(target, draft)
    fs.unlink(draft)


def read_bytes(path: Location) -> bytes:
    """The content of one regular file, or of an object."""
    return fs.read_bytes(path) if isinstance(path, Path) else objects.read(path)


def listed(path: Location) -> list[Location]:
    """What is right below a folder or key, sorted."""
    return sorted(path.iterdir(), key=str)


def each(function: Callable[[Location], T], paths: Sequence[Location]) -> Iterator[T]:
    """What a function says of each path; a store is asked for several at once."""
    if not any(isinstance(path, ObjectPath) for path in paths):
        yield from map(function, paths)
        return
    with ThreadPoolExecutor(AT_ONCE, "align-places") as pool:
        yield from pool.map(function, paths)


def size_of(path: Location) -> int | None:
    """The length of a file; None if there is none."""
    if isinstance(path, ObjectPath):
        found = objects.version_of(path)
        return found.size if found else None
    with suppress(FileNotFoundError):
        return path.stat(follow_symlinks=False).st_size
    return None


def version_of(path: Location) -> str:
    """A text that changes when a file is replaced; empty if there is none."""
    if isinstance(path, ObjectPath):
        return str(objects.version_of(path) or "")
    with suppress(FileNotFoundError):
        found = path.stat()
        return f"{found.st_ino} {found.st_mtime_ns}"
    return ""


def unlink(path: Location) -> None:
    """Removes a file, if it exists."""
    if isinstance(path, Path):
        fs.unlink(path)
    else:
        objects.remove(path)


def make_folder(path: Location) -> None:
    """Makes one folder, unless it exists; a store has none."""
    if isinstance(path, Path):
        fs.make_folder(path)


def fsync_folder(path: Location) -> None:
    """Makes the names in a folder durable; those of objects are."""
    if isinstance(path, Path):
        fs.fsync_folder(path)


def remove_folder(path: Location) -> None:
    """Removes a folder if it is empty; a store has none."""
    if isinstance(path, Path):
        fs.remove_folder(path)
