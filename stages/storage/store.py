"""Where files lie, on a disk or as objects of a bucket: one set of operations for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...schemas.file_version import Remember
from .bucket.bucket_store import BucketStore
from .bucket.objects import Location
from .disk.disk_store import DiskStore

P = TypeVar("P")
T = TypeVar("T")
U = TypeVar("U")


class Store(Protocol[P]):
    """Operations on files. Each is written whole, and is durable under its name then."""

    has_folders: bool  # which exist by themselves, and may hold what others put there
    removes_at_once: bool  # a folder; else its files go one by one
    is_near: bool  # to ask it costs no request

    def put_if_absent(self, path: P, payload: bytes) -> bool:
        """Writes a file unless there is one; returns whether it did.

        Of several at the same time one does.
        """
        ...

    def replace(self, path: P, payload: bytes, *, known: bytes | None) -> None:
        """Writes a file in place of one with known bytes, or of none.

        A bucket refuses if it has other bytes; on a disk the owner's lock sees to that.
        """
        ...

    def install(self, draft: Path, target: P) -> None:
        """Gives a whole draft its name, which is made of its content."""
        ...

    def read(self, path: P) -> bytes:
        """The bytes of a file."""
        ...

    def open(self, path: P) -> BufferedReader:
        """A file to read from; of a bucket a copy, compared with the bytes it has to hold."""
        ...

    def local(self, path: P) -> Path:
        """A file of a disk with these bytes."""
        ...

    def ahead(self, paths: Iterable[P]) -> Iterator[P]:
        """The paths in order; what has to be fetched of the next few is fetched meanwhile."""
        ...

    def listed(self, folder: P) -> list[P]:
        """The paths right below, sorted."""
        ...

    def each(self, function: Callable[[U], T], things: Sequence[U]) -> Iterator[T]:
        """The function's result for each thing, such as a path; of a bucket several at once."""
        ...

    def size(self, path: P) -> int | None:
        """The length of a file; None if there is none."""
        ...

    def pinned(self, path: P, sha256: str, size: int) -> P:
        """The path with the bytes that it has to hold, where a copy of it is compared with them."""
        ...

    def measure(self, path: P, size: int, remember: Remember) -> tuple[int, str]:
        """The length and the digest of a file's own bytes; no digest if it has another length.

        CorruptionError if it cannot be opened.
        """
        ...

    def measure_read(self, path: P, size: int, remember: Remember) -> tuple[int, str]:
        """Like `measure`, of the bytes that `open` reads; a damaged copy is fetched again."""
        ...

    def remove(self, path: P) -> None:
        """Removes a file, if there is one."""
        ...

    def retire(self, folder: P, *, first: str) -> bool:
        """Takes a folder away, or of a bucket the file `first`, then all others.

        Returns whether this process did; of several one does.
        """
        ...

    def make_folder(self, folder: P) -> None:
        """Makes a folder, and its name durable; nothing in a bucket."""
        ...

    def sync_names(self, folder: P) -> None:
        """Makes the names in a folder durable; nothing in a bucket."""
        ...

    def remove_if_empty(self, folder: P) -> None:
        """Removes a folder without files; nothing in a bucket."""
        ...

    def drop_drafts(self, folder: P, names: Sequence[str]) -> None:
        """Removes what dead writers left of these files; nothing in a bucket."""
        ...

    def work_folder(self, root: P) -> Path:
        """Where a command keeps what needs a disk: the root itself, or a folder of its own here."""
        ...

    def free_bytes(self, root: P) -> int | None:
        """The bytes that may still be written; None of a bucket, which grows."""
        ...

    def folder_beside(self, root: P) -> Path:
        """A folder of a disk for what is made of the root: the one it is in, or the current one."""
        ...

    def is_within(self, path: P, folder: Path) -> bool:
        """Whether a file is in a folder of a disk."""
        ...


def store_of(path: Location) -> Store[Any]:
    """The operations for a location; nothing else asks what kind it is."""
    return _DISK if isinstance(path, Path) else _BUCKETS


_DISK = DiskStore()
_BUCKETS = BucketStore()
