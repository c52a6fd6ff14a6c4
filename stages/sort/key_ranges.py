"""Key ranges: rows are written partitioned by them, and one is read whole and sorted at once.

The key is the ring key. Every range is as wide as the others, so that how many there are says which
keys are in each, whoever asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.preparing import Block
from ...schemas.row_keys import KeyedRows
from ..storage.cache.spool import NewPart, damaged_part, read_part
from .page_columns import from_page, to_page
from .pages import PAGE, PageWriter, read_pages

# Rows that are divided at once: of each such portion a file has a page for every range.
TOKENS_PER_PORTION = 4 * 1024 * 1024
# What the other columns of a branch weigh, in tokens: short rows are mostly columns.
TOKENS_PER_BRANCH = 40

BYTES_PER_RANGE = 8 << 20
MOST_RANGES = 1024  # so that a page is worth one read


def number_of_ranges(input_bytes: int) -> int:
    """How many key ranges the rows of so much data are divided into."""
    return min(MOST_RANGES, 1 + input_bytes // BYTES_PER_RANGE)


def first_keys(num_ranges: int) -> NDArray[np.uint64]:
    """The first key of every range."""
    return np.array([(number << 64) // num_ranges for number in range(num_ranges)], dtype="<u8")


def write_partitions(part: NewPart, chunks: Iterable[KeyedRows], num_ranges: int) -> Block:
    """Writes rows in pages, one of each portion and range; returns where their directory is."""
    pages, firsts = PageWriter(part), first_keys(num_ranges)
    for portion in _portions(chunks):
        page, stops = _divided(portion, firsts)
        for start, stop in pairwise([0, *stops]):
            pages.append(page.slice(start, stop - start))
    return pages.end()


def _portions(chunks: Iterable[KeyedRows]) -> Iterator[list[KeyedRows]]:
    portion: list[KeyedRows] = []
    tokens = 0
    for rows in filter(len, chunks):
        portion.append(rows)
        tokens += _weight(rows)
        if tokens >= TOKENS_PER_PORTION:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion


def _weight(keyed: KeyedRows) -> int:
    rows = keyed.rows
    tokens = len(rows.completions.values) + len(rows.prompts.values)
    return tokens + TOKENS_PER_BRANCH * len(rows.completions)


def _divided(
    portion: list[KeyedRows], firsts: NDArray[np.uint64]
) -> tuple[pa.RecordBatch, list[int]]:
    """The rows of a portion range by range, and where each range ends among them.

    `portion` is emptied, so that no row is held three times.
    """
    rows = KeyedRows.concat(portion)
    portion.clear()
    range_of_row = np.searchsorted(firsts, rows.ring_keys, side="right") - 1
    stops = np.cumsum(np.bincount(range_of_row, minlength=len(firsts)))
    order = np.argsort(range_of_row.astype(np.uint16), kind="stable")
    return to_page(rows.take(order)), stops.tolist()


@dataclass(frozen=True)
class PartitionedRows:
    """The rows of one slice of the data, partitioned by key range."""

    path: Path
    directory: Block
    num_ranges: int
    first_row: int  # rows of all data before those of its file range
    file_start: int  # rows of all data before its file of data

    def read(self, number: int) -> list[pa.RecordBatch]:
        """The pages of a key range."""
        size = PAGE.itemsize
        wanted = range(number, self.directory.bytes // size, self.num_ranges)
        start = self.directory.start
        found = b"".join(read_part(self.path, start + page * size, size) for page in wanted)
        if len(found) != len(wanted) * size:
            raise damaged_part(self.path)
        entries = np.frombuffer(found, dtype=PAGE)
        # These have no checksum but that of their page.
        within = [entries[name] <= start for name in ("schema", "start", "size")]
        if entries["number"].tolist() != [*wanted] or not np.all(within):
            raise damaged_part(self.path)
        return read_pages(self.path, entries)


def sorted_partition(files: Sequence[PartitionedRows], number: int) -> KeyedRows | None:
    """The rows of a key range in ring order, each numbered in its file of data; None without any.

    Rows of equal content are in the order of the data.
    """
    parts = [file.read(number) for file in files]
    pages = [page for part in parts for page in part]
    if not pages:
        return None
    lengths = [sum(map(len, part)) for part in parts]
    first_rows = np.repeat([file.first_row for file in files], lengths)
    joined = pa.Table.from_batches(pages).combine_chunks()
    del parts, pages  # so that no row is held three times
    keyed = from_page(KeyedRows, *joined.to_batches())
    del joined
    keyed = _with_numbers(keyed, keyed.rows.row + first_rows).in_ring_order()
    starts = np.unique([file.file_start for file in files])
    row = keyed.rows.row
    return _with_numbers(keyed, row - starts[np.searchsorted(starts, row, side="right") - 1])


def _with_numbers(keyed: KeyedRows, row: NDArray[np.int64]) -> KeyedRows:
    return replace(keyed, rows=replace(keyed.rows, row=row))


def with_copies_numbered(keyed: KeyedRows, notes: Counter[str]) -> KeyedRows:
    """Numbers rows of equal content 0, 1, 2, ... in ring order."""
    row_id = keyed.rows.row_id
    is_first = np.append(True, row_id[1:] != row_id[:-1])
    index = np.arange(len(row_id))
    copy = index - np.maximum.accumulate(np.where(is_first, index, 0))
    notes["rows_that_repeat_another_row"] += int((~is_first).sum())
    return replace(keyed, rows=replace(keyed.rows, copy=copy.astype(np.int32)))
