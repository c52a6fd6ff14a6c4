"""Records: small signed JSON files, each written whole, on a disk or in a bucket.

A kind of record is declared once, where it is used: its type, what it must not say, and what a
person does about a damaged one. A byte that differs is damage, but for
what a kind leaves out of its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ...schemas.errors import CorruptionError, damaged
from ...schemas.json_codec import CodecError, from_signed_json, to_signed_json
from .bucket.objects import Location
from .disk import fs
from .store import store_of

T = TypeVar("T")


@dataclass(frozen=True)
class SignedRecords(Generic[T]):
    """One kind of record; each is named by its path."""

    kind: type[T]
    remedy: str  # what to do about a damaged one
    format_version: int | None = None  # None: of a kind that has none
    # What a signed one says that cannot be; the first is told.
    faults: Callable[[T, Location], Iterable[str]] = lambda record, path: ()

    def find(self, path: Location) -> T | None:
        """The record; None if there is none."""
        return self.read(path) if store_of(path).size(path) is not None else None

    def read(self, path: Location) -> T:
        """The record; CorruptionError if it is not what was written."""
        try:
            record = from_signed_json(self.kind, store_of(path).read(path), self.format_version)
        except CodecError as error:
            raise self.damaged(path, str(error)) from error
        for fault in self.faults(record, path):
            raise self.damaged(path, fault)
        return record

    def put(self, path: Location, record: T) -> T:
        """Writes a record unless there is one; returns the one that counts, itself if it is new."""
        payload = to_signed_json(record).encode()
        is_first = store_of(path).put_if_absent(path, payload)
        return record if is_first else self.read(path)

    def replace(self, path: Path, record: T) -> None:
        """Writes a record on a disk, in place of any other."""
        fs.publish(path, to_signed_json(record).encode())

    def names(self, folder: Location) -> list[Location]:
        """The paths in a folder or below a key, sorted; those with a dot are drafts of the dead."""
        found = store_of(folder).listed(folder) if folder.is_dir() else []
        return [path for path in found if not path.name.startswith(".")]

    def drop(self, path: Location) -> None:
        """Removes a record durably; what it names may go only then."""
        store = store_of(path)
        store.remove(path)
        store.sync_names(path.parent)

    def damaged(self, path: Location, why: str) -> CorruptionError:
        """The error of a damaged record, or of a file that it names."""
        return damaged(path, why, self.remedy)
