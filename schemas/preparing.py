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
class EncodedPart:
    """The tokenized rows of one slice of the data, in sorted runs, partitioned by key range."""

    file: PartFile
    batches: int
    runs: int
    rows_passed: int  # all rows of the slice's file range, which other slices may share
    rows_in: int  # read, good and bad
    notes: dict[str, int]
    reasons: dict[str, int]  # why rows cannot be used -> rows
    rejected: tuple[Rejected, ...]  # by row, up to a limit; rows count from the file range's first


@dataclass(frozen=True)
class ArrangedPart:
    """The rows of one key range, a contiguous part of the ring."""

    file: PartFile
    batches: int
    rows: int
    completions: int
    keys_crc: int  # of the completions' keys, which follow the batches
    sizes_crc: int  # of the rows' sizes, which follow the keys
    index_crc: int  # of the index, which follows the sizes
    notes: dict[str, int]


@dataclass(frozen=True)
class RingRecord:
    """The ring as a whole: its parts, and the file of its partners and its index."""

    file: PartFile
    batches: int
    index_crc: int  # of the index, which follows the partners
    parts: tuple[PartFile, ...]
    notes: dict[str, int]
