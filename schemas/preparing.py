"""The records of preparing: for each task, the file it made and what was counted while it did."""

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
    """The tokenized rows of one slice of the data, in sorted runs, divided by key range."""

    file: PartFile
    batches: int
    runs: int
    rows_passed: int  # rows of the slice's stretch, those of its other shares too
    rows_in: int  # read, good and bad
    notes: dict[str, int]
    reasons: dict[str, int]  # why rows cannot be used -> rows
    rejected: tuple[Rejected, ...]  # by row, up to a limit; rows count from the stretch's first


@dataclass(frozen=True)
class ArrangedPart:
    """One key range of all rows: a stretch of the ring."""

    file: PartFile
    batches: int
    rows: int
    completions: int
    keys_crc: int  # of the keys of the completions behind the batches
    sizes_crc: int  # of the sizes of the rows behind the keys
    index_crc: int  # of the index behind the sizes
    notes: dict[str, int]


@dataclass(frozen=True)
class RingRecord:
    """The ring as a whole: its stretches, and the file of its partners and its index."""

    file: PartFile
    batches: int
    index_crc: int  # of the index behind the partners
    parts: tuple[PartFile, ...]
    notes: dict[str, int]
