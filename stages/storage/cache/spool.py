"""The spool: the files of preparing, named by their content, and the commits that name them.

encoded/<slice>.json and -<sha256>.arrows   rows of a slice of the data, until the ring is whole
arranged/<range>.json and -<sha256>.arrows  the rows of a key range, sorted
ring.json and -<sha256>.arrows              the partners, and the directory of all sorted rows
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from ....schemas.errors import CorruptionError, StorageError, damaged, os_errors_as_storage_errors
from ....schemas.json_codec import to_signed_json
from ....schemas.preparing import ArrangedPart, Block, EncodedPart, PartFile, RingRecord
from ..disk import fs
from ..signed_records import SignedRecords
from ..store import store_of

T = TypeVar("T", EncodedPart, ArrangedPart, RingRecord)


@dataclass(frozen=True)
class Spool:
    """The folder of the files of preparing."""

    root: Path

    def prepare(self) -> None:
        """Makes the folders."""
        for folder in (self.root, self.root / "encoded", self.root / "arranged"):
            fs.make_folder(folder)
        fs.fsync_folder(self.root)

    def encoded(self, number: int) -> Path:
        """The commit of a slice of the data."""
        return self.root / "encoded" / f"{number:08d}.json"

    def arranged(self, number: int) -> Path:
        """The commit of a key range."""
        return self.root / "arranged" / f"{number:08d}.json"

    @property
    def ring(self) -> Path:
        """The commit of the ring; written last."""
        return self.root / "ring.json"

    def forget_encoded(self) -> None:
        """Removes the rows of the slices, which the whole ring holds by now."""
        found = sorted((self.root / "encoded").iterdir())
        drafts = {path for path in found if path.name.startswith(".")}
        # Commits first: one must never name a file that was removed on purpose.
        for path in sorted({*found} - drafts, key=lambda path: path.suffix != ".json"):
            fs.unlink(path)
        for name in {path.name[1:].rsplit(".", 2)[0] for path in drafts}:
            fs.drop_drafts(self.root / "encoded" / name)


@dataclass
class NewPart:
    """A file that is being written, and the digest of what was written so far."""

    commit: Path  # of the task that writes it
    sink: io.BufferedWriter
    size: int = 0
    _digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def write(self, content: memoryview | bytes | bytearray) -> None:
        """Appends."""
        self.sink.write(content)
        self._digest.update(content)
        self.size += len(content)

    def write_block(self, content: bytes | bytearray) -> Block:
        """Appends, and returns what reads it again."""
        block = Block(self.size, len(content), crc32(content))
        self.write(content)
        return block

    @property
    def file(self) -> PartFile:
        """The file as it is written by now."""
        sha256 = self._digest.hexdigest()
        return PartFile(f"{self.commit.stem}-{sha256[:16]}.arrows", self.size, sha256)


@contextmanager
def new_part(commit: Path) -> Iterator[NewPart]:
    """A file to write into, durable at the end of the block, beside the commit that names it."""
    with fs.locked_draft(commit.with_suffix(".arrows")) as (draft, sink):
        part = NewPart(commit, sink)
        yield part
        sink.flush()
        store_of(commit).install(draft, commit.with_name(part.file.name))


def put_commit(commit: Path, record: T) -> None:
    """Commits a task, unless another process was first; its file is then the one that counts.

    That one may also have ended all tasks of this kind since, and removed what they made.
    """
    if fs.put_if_absent(commit, to_signed_json(record).encode()):
        return
    try:
        first = read_commit(type(record), commit)
    except StorageError:
        if commit.exists():
            raise
        fs.unlink(commit.with_name(record.file.name))
        return
    if first.file.name != record.file.name:
        if not commit.with_name(first.file.name).exists():
            raise damaged(commit, f"{first.file.name}, which it names, is missing", _REMEDY)
        fs.unlink(commit.with_name(record.file.name))


def read_commit(kind: type[T], commit: Path) -> T:
    """The record of a finished task."""
    return SignedRecords(kind, _REMEDY).read(commit)


def find_commit(kind: type[T], commit: Path) -> T | None:
    """The record of a task that is done and whose file is there; another may remove both."""
    try:
        record = SignedRecords(kind, _REMEDY).find(commit)
    except StorageError:
        if commit.exists():
            raise
        return None
    return record if record and commit.with_name(record.file.name).exists() else None


def read_part(path: Path, start: int, size: int) -> bytes:
    """Bytes of one of these files, fewer where it ends."""
    with os_errors_as_storage_errors("read", path):
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(size)
        except FileNotFoundError:
            raise damaged_part(path) from None


def bytes_of(path: Path, block: Block) -> bytes:
    """The bytes of a block."""
    content = read_part(path, block.start, block.bytes)
    if len(content) != block.bytes or crc32(content) != block.crc:
        raise damaged_part(path)
    return content


def damaged_part(path: Path) -> CorruptionError:
    """The error of a file that is missing or holds other bytes than were written."""
    why = "its bytes are not those that were written (a checksum differs, or it is missing)"
    return damaged(path, why, _REMEDY)


_REMEDY = (
    "Remove this file and run the same command again: rows are prepared again, and no finished "
    "shard is lost."
)


@contextmanager
def new_map(path: Path, size: int) -> Iterator[mmap.mmap]:
    """Zero bytes in memory that is a file, which is removed at the end of the block.

    All of its room is taken already: a disk that fills up under a map is a signal, not an error
    that can be caught.
    """
    with fs.locked_draft(path) as (draft, sink):
        with os_errors_as_storage_errors("allocate", path):
            os.posix_fallocate(sink.fileno(), 0, size)
        with os_errors_as_storage_errors("map", path), draft.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), size)
        yield mapped
    fs.unlink(draft)
