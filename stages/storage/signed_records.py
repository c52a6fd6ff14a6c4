"""Records: small signed JSON files, each written whole.

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
from .disk import fs

T = TypeVar("T")


@dataclass(frozen=True)
class SignedRecords(Generic[T]):
    """One kind of record; each is named by its path."""

    kind: type[T]
    remedy: str  # what to do about a damaged one
    format_version: int | None = None  # None: of a kind that has none
    # What a signed one says that cannot be; the first is told.
    faults: Callable[[T, Path], Iterable[str]] = lambda record, path: ()

    def find(self, path: Path) -> T | None:
        """The record; None if there is none."""
        return self.read(path) if path.exists() else None

    def read(self, path: Path) -> T:
        """The record; CorruptionError if it is not what was written."""
        try:
            record = from_signed_json(self.kind, fs.read_bytes(path), self.format_version)
        except CodecError as error:
            raise self.damaged(path, str(error)) from error
        for fault in self.faults(record, path):
            raise self.damaged(path, fault)
        return record

    def put(self, path: Path, record: T) -> T:
        """Writes a record unless there is one; returns the one that counts, itself if it is new."""
        payload = to_signed_json(record).encode()
        is_first = fs.put_if_absent(path, payload)
        return record if is_first else self.read(path)

    def replace(self, path: Path, record: T) -> None:
        """Writes a record on a disk, in place of any other."""
        fs.publish(path, to_signed_json(record).encode())

    def names(self, folder: Path) -> list[Path]:
        """The paths in a folder, sorted; those with a dot are drafts of the dead."""
        return sorted(folder.glob("[!.]*"))

    def drop(self, path: Path) -> None:
        """Removes a record durably; what it names may go only then."""
        fs.unlink(path)
        fs.fsync_folder(path.parent)

    def damaged(self, path: Path, why: str) -> CorruptionError:
        """The error of a damaged record, or of a file that it names."""
        return damaged(path, why, self.remedy)
