"""Key ranges: encoded rows are written divided by them, and each becomes a stretch of the ring.

A key is a row's place on the ring. Every range is as wide as the others, so that how many there are
says which keys are in each, whoever asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ...schemas.preparing import EncodedPart
from ...schemas.row_keys import KeyedRows
from ...schemas.rows import Role
from ..storage.cache.shards import group_bounds
from ..storage.cache.spool import NewPart, damaged_part, read_part
from .sorted_rows import INDEX, BatchStream, SortedRows, append_rows, part_of

TOKENS_PER_RUN = 4 * 1024 * 1024
TOKENS_PER_MERGE = 4 * 1024 * 1024
# A merge keeps up to one unfinished batch of each run in memory.
TOKENS_PER_BATCH_OF_A_RUN = TOKENS_PER_RUN // 64
# What the other columns of a branch weigh, in tokens: short rows are mostly columns.
TOKENS_PER_BRANCH = 40

BYTES_PER_RANGE = 8 << 20
MOST_RANGES = 1024  # so that a run's part of a range is worth one read

# Of each range in each run: the entries of its batches in the file's index.
_DIRECTORY = np.dtype([("first", "<u4"), ("stop", "<u4"), ("crc", "<u4")])


def number_of_ranges(input_bytes: int) -> int:
    """How many key ranges the rows of so much data are divided into."""
    return min(MOST_RANGES, 1 + input_bytes // BYTES_PER_RANGE)


def first_keys(num_ranges: int) -> NDArray[np.uint64]:
    """The first key of every range."""
    return np.array([(number << 64) // num_ranges for number in range(num_ranges)], dtype="<u8")


@dataclass(frozen=True)
class WrittenRuns:
    """What a file of sorted runs holds."""

    batches: int
    runs: int


def write_runs(part: NewPart, chunks: Iterable[KeyedRows], num_ranges: int) -> WrittenRuns:
    """Writes rows as runs, each sorted and small enough to be sorted in memory.

    Behind the batches are their index and the directory of the ranges in it.
    """
    stream, edges = BatchStream(part.write), first_keys(num_ranges)
    index, directory = bytearray(), bytearray()
    for run, batch in enumerate(_batched(chunks)):
        directory += bytes(num_ranges * _DIRECTORY.itemsize)
        ranges = np.frombuffer(directory, dtype=_DIRECTORY)[run * num_ranges :]
        keyed = _in_ring_order(batch)
        stops = [*np.searchsorted(keyed.ring_keys, edges[1:]).tolist(), len(keyed)]
        start = 0
        for number, stop in enumerate(stops):
            first = len(index) // INDEX.itemsize
            entries = _append_piece(stream, part_of(keyed, slice(start, stop)))
            index += entries.tobytes()
            ranges[number] = (first, first + len(entries), _checksum(first, entries))
            start = stop
        del keyed, ranges
    stream.end()
    part.write(bytes(index))
    part.write(bytes(directory))
    runs = len(directory) // (num_ranges * _DIRECTORY.itemsize)
    return WrittenRuns(len(index) // INDEX.itemsize, runs)


def _batched(chunks: Iterable[KeyedRows]) -> Iterator[list[KeyedRows]]:
    batch: list[KeyedRows] = []
    tokens = 0
    for keyed in filter(len, chunks):
        batch.append(keyed)
        tokens += _weight(keyed)
        if tokens >= TOKENS_PER_RUN:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _weight(keyed: KeyedRows) -> int:
    rows = keyed.rows
    tokens = len(rows.completions.values) + len(rows.prompts.values)
    return tokens + TOKENS_PER_BRANCH * len(rows.completions)


def _in_ring_order(parts: list[KeyedRows]) -> KeyedRows:
    """All rows as one sorted block; `parts` is emptied, so that no row is held three times."""
    joined = KeyedRows.concat(parts)
    parts.clear()
    return joined.in_ring_order()


def _append_piece(stream: BatchStream, keyed: KeyedRows) -> NDArray[Any]:
    """What a run has in a range, in batches of bounded size."""
    return append_rows(stream, keyed, group_bounds(keyed.rows, TOKENS_PER_BATCH_OF_A_RUN))


def _checksum(first: int, entries: NDArray[Any]) -> int:
    return crc32(entries.tobytes(), first & 0xFFFFFFFF)


@dataclass(frozen=True)
class RunsFile:
    """The sorted runs of one slice of the data."""

    path: Path
    part: EncodedPart
    first_row: int  # how many rows of all data are before its stretch
    file_start: int  # how many rows of all data are before its file of data

    def of_range(self, number: int, num_ranges: int) -> NDArray[Any]:
        """The entries of the batches that hold a key range, run by run."""
        size, part = _DIRECTORY.itemsize, self.part
        directory = part.file.bytes - part.runs * num_ranges * size
        index = directory - part.batches * INDEX.itemsize
        found = [np.empty(0, dtype=INDEX)]
        for run in range(part.runs):
            place = directory + (run * num_ranges + number) * size
            (entry,) = np.frombuffer(self._read(place, size), dtype=_DIRECTORY)
            first, stop = int(entry["first"]), int(entry["stop"])
            if not first <= stop <= part.batches:
                raise damaged_part(self.path)
            start, stop = (index + place * INDEX.itemsize for place in (first, stop))
            entries = np.frombuffer(self._read(start, stop - start), dtype=INDEX)
            if _checksum(first, entries) != entry["crc"]:
                raise damaged_part(self.path)
            found.append(entries)
        return np.concatenate(found)

    def _read(self, start: int, size: int) -> bytes:
        content = read_part(self.path, start, size)
        if len(content) != size:
            raise damaged_part(self.path)
        return content


def arranged(
    files: Sequence[RunsFile],
    number: int,
    num_ranges: int,
    notes: Counter[str],
    *,
    join: Callable[[KeyedRows], KeyedRows] | None = None,
) -> Iterator[KeyedRows]:
    """The rows of a key range in ring order, in parts; `join` makes one row of those of one prompt.

    Every batch is read once. What is yielded together are whole prompts.
    """
    indexes = [file.of_range(number, num_ranges) for file in files]
    index = np.concatenate([np.empty(0, dtype=INDEX), *indexes])
    index["file"] = np.repeat(np.arange(len(files)), list(map(len, indexes)))
    rows = SortedRows(tuple(file.path for file in files), index)
    read = partial(_numbered, rows, np.array([file.first_row for file in files]))
    starts = np.unique([file.file_start for file in files])
    for keyed in _merged(index, read):
        numbered = _as_in_file(keyed, starts)
        del keyed
        notes["pairs_in_both_orders"] += _in_both_orders(numbered)
        yield _number_copies(join(numbered) if join else numbered, notes)
        del numbered


def _numbered(rows: SortedRows, first_rows: NDArray[np.int64], batch: int) -> KeyedRows:
    """A batch whose rows are numbered through all data, which orders rows of equal content."""
    keyed = rows.batch(batch)
    number = keyed.rows.row + first_rows[rows.index["file"][batch]]
    return replace(keyed, rows=replace(keyed.rows, row=number))


def _as_in_file(keyed: KeyedRows, starts: NDArray[np.int64]) -> KeyedRows:
    """The same rows, each numbered in its file of data."""
    number = keyed.rows.row
    number = number - starts[np.searchsorted(starts, number, side="right") - 1]
    return replace(keyed, rows=replace(keyed.rows, row=number))


def _merged(index: NDArray[Any], read: Callable[[int], KeyedRows]) -> Iterator[KeyedRows]:
    """Sorted batches as one sequence, in parts.

    They are read in the order of their first places. No batch that is still to be read has a row
    before its first place, so what is held of the rows before the next one is complete.
    """
    order = np.argsort(index["first_place"], kind="stable")
    held: list[KeyedRows] = []
    tokens = 0
    for place, batch in enumerate(order.tolist(), start=1):
        held.append(read(batch))
        tokens += _weight(held[-1])
        if place == len(order):
            yield _in_ring_order(held)
        elif tokens >= TOKENS_PER_MERGE:
            keyed = _in_ring_order(held)
            stop = int(np.searchsorted(keyed.ring_keys, index["first_place"][order[place]]))
            if stop:
                yield part_of(keyed, slice(0, stop))
            held, tokens = [part_of(keyed, slice(stop, len(keyed)))], 0
            del keyed


def _in_both_orders(keyed: KeyedRows) -> int:
    """How many pairs of completions are there as chosen and rejected and the other way round."""
    rows = keyed.rows
    starts = rows.branch_offsets[:-1][np.diff(rows.branch_offsets) == 2]
    firsts = starts[(rows.roles[starts] == Role.CHOSEN) & (rows.roles[starts + 1] == Role.REJECTED)]
    chosen, rejected = keyed.completion_keys[firsts], keyed.completion_keys[firsts + 1]
    places, is_turned = keyed.ring_keys[rows.row_of_branch[firsts]], chosen > rejected
    pairs = np.stack([places, np.minimum(chosen, rejected), np.maximum(chosen, rejected)])
    order = np.lexsort((is_turned, *pairs))
    pairs, is_turned = pairs[:, order], is_turned[order]
    is_same = (pairs[:, 1:] == pairs[:, :-1]).all(axis=0)
    return int((is_same & (is_turned[1:] != is_turned[:-1])).sum())


def _number_copies(keyed: KeyedRows, notes: Counter[str]) -> KeyedRows:
    """Numbers rows of equal content 0, 1, 2, ... in ring order."""
    row_id = keyed.rows.row_id
    is_first = np.append(True, row_id[1:] != row_id[:-1])
    place = np.arange(len(row_id))
    copy = place - np.maximum.accumulate(np.where(is_first, place, 0))
    notes["rows_that_repeat_another_row"] += int((~is_first).sum())
    return replace(keyed, rows=replace(keyed.rows, copy=copy.astype(np.int32)))
