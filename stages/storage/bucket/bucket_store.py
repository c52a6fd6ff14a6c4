"""Objects of a bucket, as a `Store`.

An object is written whole, by one request, and is durable then; there are no folders, and the order
of the requests is the order in which others see them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ....schemas.file_version import Remember
from ..disk import fs
from . import local_copies, objects
from .objects import ObjectPath

T = TypeVar("T")
U = TypeVar("U")

AT_ONCE = 16  # requests to a store


class BucketStore:
    """Objects, each by a request, and copies of them on this machine."""

    has_folders = False
    removes_at_once = False
    is_near = False

    read = staticmethod(objects.read)
    open = staticmethod(local_copies.open_copy)
    local = staticmethod(local_copies.copy_of)
    ahead = staticmethod(local_copies.fetched_ahead)
    remove = staticmethod(objects.remove)
    work_folder = staticmethod(local_copies.work_folder)

    @staticmethod
    def put_if_absent(path: ObjectPath, payload: bytes) -> bool:
        """One that has these very bytes counts as written: an answer may have been lost."""
        return objects.put_new(path, payload)

    @staticmethod
    def replace(
        path: ObjectPath,
        payload: bytes,
        *,
        known: bytes | None,
    ) -> None:
        """Of two that replace one object with different ones the second is refused."""
        objects.put_over(path, payload, expected=known)

    @staticmethod
    def install(draft: Path, target: ObjectPath) -> None:
        """By an upload."""
        objects.put(target, draft)
        fs.unlink(draft)

    @staticmethod
    def listed(path: ObjectPath) -> list[ObjectPath]:
        """The objects, and what holds further ones, right below a key."""
        return [*path.iterdir()]

    @staticmethod
    def each(function: Callable[[U], T], things: Sequence[U]) -> Iterator[T]:
        """Several at once, and no more results than that wait to be taken."""
        with ThreadPoolExecutor(AT_ONCE, "align-objects") as pool:
            waiting: deque[Future[T]] = deque()
            for thing in things:
                waiting.append(pool.submit(function, thing))
                if len(waiting) > AT_ONCE:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    @staticmethod
    def size(path: ObjectPath) -> int | None:
        """As the store says."""
        found = objects.version_of(path)
        return found.size if found else None

    @staticmethod
    def pinned(path: ObjectPath, sha256: str, size: int) -> ObjectPath:
        """The path with its bytes."""
        return path.pinned(sha256, size)

    @staticmethod
    def measure(path: ObjectPath, size: int, remember: Remember) -> tuple[int, str]:
        """Of the object, whatever copies there are."""
        return local_copies.sha256_of(path)

    @staticmethod
    def measure_read(path: ObjectPath, size: int, remember: Remember) -> tuple[int, str]:
        """Of the copy, which is what the object has to be, or is fetched again."""
        local_copies.check_copy(path, remember)
        return path.bytes, path.sha256

    @staticmethod
    def retire(path: ObjectPath, *, first: str) -> bool:
        """The first object goes first, so that nobody takes up the rest."""
        was_there = (path / first).is_file()
        objects.remove(path / first)
        objects.remove_below(path)
        return was_there

    @staticmethod
    def make_folder(path: ObjectPath) -> None:
        """Nothing: there are none."""

    @staticmethod
    def sync_names(path: ObjectPath) -> None:
        """Nothing: they are durable."""

    @staticmethod
    def remove_if_empty(path: ObjectPath) -> None:
        """Nothing: there are no folders."""

    @staticmethod
    def drop_drafts(path: ObjectPath, names: Sequence[str]) -> None:
        """Nothing: there are none."""

    @staticmethod
    def free_bytes(path: ObjectPath) -> None:
        """Nothing: it grows."""

    @staticmethod
    def folder_beside(path: ObjectPath) -> Path:  # none is
        """The current folder."""
        return Path()

    @staticmethod
    def is_within(path: ObjectPath, folder: Path) -> bool:  # it is on no disk
        """Never."""
        return False
