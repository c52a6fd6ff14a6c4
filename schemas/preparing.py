"""The records of preparing: for each task, the file it made, and its counts."""

from __future__ import annotations

from dataclasses import dataclass

from .rows import Rejected


@dataclass(frozen=True)
class PartFile:
    """A file of preparing, named by the digest of its bytes."""

    name: str  # in the folder of its kind
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Block:
    """Consecutive bytes of such a file, and their CRC-32."""

    start: int
    bytes: int
    crc: int


@dataclass(frozen=True)
class EncodedPart:
    """The tokenized rows of one slice of the data, in pages, partitioned by key range."""

    file: PartFile
    directory: Block
    rows_in: int  # read, good and bad
    notes: dict[str, int]
    reasons: dict[str, int]  # why rows cannot be used -> rows
    rejected: tuple[Rejected, ...]  # by row, up to a limit; rows count from the slice's first


@dataclass(frozen=True)
class ArrangedPart:
    """The rows of one key range, a contiguous part of the ring."""

    file: PartFile
    directory: Block
    keys: Block  # of the completions
    sizes: Block  # of the rows
    rows: int
    completions: int
    notes: dict[str, int]


@dataclass(frozen=True)
class RingRecord:
    """The ring as a whole: its parts, and the file of its partners."""

    file: PartFile
    partners: Block  # the directory of their pages
    rows: Block  # the directory of all parts
    parts: tuple[PartFile, ...]
    notes: dict[str, int]
