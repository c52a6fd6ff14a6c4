"""Records: small JSON files, each a dataclass with a digest, written atomically.

A kind of record is declared once: its type, and the remedy for a damaged file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ...schemas.errors import CorruptionError, damaged
from ...schemas.json_codec import CodecError, from_signed_json, to_signed_json
from .disk import fs

T = TypeVar("T")


@dataclass(frozen=True)
class Records(Generic[T]):
    """One kind of record; a record is found by its path."""

    kind: type[T]
    remedy: str
    format_version: int | None = None  # None: this kind has no version

    def find(self, path: Path) -> T | None:
        """The record; None if there is none."""
        return self.read(path) if path.exists() else None

    def read(self, path: Path) -> T:
        """The record; CorruptionError if it was altered."""
        try:
            return from_signed_json(self.kind, fs.read_bytes(path), self.format_version)
        except CodecError as error:
            raise self.damaged(path, str(error)) from error

    def put(self, path: Path, record: T) -> T:
        """Writes a record unless there is one; returns the stored one, `record` itself if new."""
        is_first = fs.put_if_absent(path, to_signed_json(record).encode())
        return record if is_first else self.read(path)

    def replace(self, path: Path, record: T) -> None:
        """Writes a record, replacing any other."""
        fs.publish(path, to_signed_json(record).encode())

    def drop(self, path: Path) -> None:
        """Removes a record durably; the files that it names may be removed afterwards."""
        fs.unlink(path)
        fs.fsync(path.parent)

    def damaged(self, path: Path, why: str) -> CorruptionError:
        """The error for a damaged record, or for a file that it names."""
        return damaged(path, why, self.remedy)
