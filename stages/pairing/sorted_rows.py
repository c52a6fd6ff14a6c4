"""Sorts rows out of core into ring order, and keeps them in files that are read batch by batch.

Each file is an Arrow IPC stream, which any Arrow reader opens. Rows wait in it for hours while they
are scored, so every batch has a CRC-32, which is compared whenever the batch is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.errors import CorruptionError, os_errors_as_storage_errors
from ...schemas.row_keys import EncodedChunk, Intake, KeyedRows
from ...schemas.rows import PromptKeys, Ragged, RowBlock
from ..storage import fs
from ..storage.shard_columns import arrow_of, bytes_of, digests_of, numpy_of
from ..storage.shards import group_bounds

TOKENS_PER_RUN = 8 * 1024 * 1024
TOKENS_PER_MERGE = 8 * 1024 * 1024
# What the other columns of a branch weigh, in tokens: short rows are mostly columns.
TOKENS_PER_BRANCH = 40

CHUNK = np.dtype([("start", "<u8"), ("size", "<u8"), ("crc", "<u4")])  # bytes of a file
INDEX = np.dtype(
    [
        ("rows", CHUNK),
        ("partners", CHUNK),
        ("row", "<i8"),  # the number behind its last
        ("completion", "<i8"),  # the number behind its last
        ("prompt_tokens", "<i8"),
        ("completion_tokens", "<i8"),
        ("first_place", "<u8"),
        ("last_place", "<u8"),
        ("first_id", "S16"),
        ("last_id", "S16"),
    ]
)
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def collect_runs(folder: Path, chunks: Iterable[EncodedChunk], intake: Intake) -> list[SortedRows]:
    """Writes the encoded rows as runs, each sorted and small enough to be sorted in memory."""
    return [
        write_rows(folder / f"run-{number:05d}.arrows", map(_in_ring_order, [batch]))
        for number, batch in enumerate(_batched(chunks, intake))
    ]


def merge_runs(
    path: Path,
    runs: Sequence[SortedRows],
    notes: Counter[str],
    *,
    join: Callable[[KeyedRows], KeyedRows] | None = None,
) -> SortedRows:
    """Merges sorted runs, which go; `join` makes one row of those of one prompt."""
    rows = write_rows(path, _merged(runs, notes, join))
    for run in runs:
        fs.unlink(run.path)
    return rows


def write_rows(path: Path, parts: Iterable[KeyedRows]) -> SortedRows:
    """Writes rows that arrive in ring order."""
    entries = [np.empty(0, dtype=INDEX)]
    with new_stream(path) as append:
        for keyed in parts:
            bounds = group_bounds(keyed.rows)
            batch = _batch_of(keyed)
            chunks = [append(batch.slice(start, stop - start)) for start, stop in bounds]
            entries.append(_entries(keyed, bounds, chunks))
            del keyed, batch  # before the next part is made
    index = np.concatenate(entries)
    for name in ("row", "completion"):
        index[name] = np.cumsum(index[name])
    return SortedRows(path, index)


@dataclass(frozen=True)
class SortedRows:
    """Rows in ring order, in one file."""

    path: Path
    index: NDArray[Any]  # (batches,) INDEX
    held: int = 0  # batches kept in memory

    def __len__(self) -> int:
        return first_of(self.index["row"], len(self.index))

    @property
    def num_completions(self) -> int:
        """Completions of all rows together."""
        return first_of(self.index["completion"], len(self.index))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return int(self.index["prompt_tokens"].sum())

    @property
    def completion_tokens(self) -> int:
        """Tokens of all completions together."""
        return int(self.index["completion_tokens"].sum())

    def batches(self) -> Iterator[KeyedRows]:
        """All rows, in bounded parts."""
        return map(self._batch, range(len(self.index)))

    def read(self, start: int, stop: int) -> KeyedRows:
        """Rows `start` to `stop`."""
        spans = parts_of(self.index["row"], start, stop)
        return KeyedRows.concat([_part(self._batch(number), part) for number, part in spans])

    def first_completion(self, row: int) -> int:
        """The number of the first completion of a row."""
        ((number, part),) = parts_of(self.index["row"], row, row + 1)
        branches = self._batch(number).rows.branch_offsets
        return first_of(self.index["completion"], number) + int(branches[part.start])

    def within(
        self, first_key: int, last_key: int, *, ids: tuple[bytes, bytes] | None = None
    ) -> Iterator[KeyedRows]:
        """The rows whose places lie between two, both included, in bounded parts.

        With `ids`, batches whose rows are all of one prompt and lie outside of them are left out.
        """
        first, last = np.uint64(first_key), np.uint64(last_key)
        index = self.index
        wanted = (index["last_place"] >= first) & (index["first_place"] <= last)
        if ids:
            outside = (index["last_id"] < ids[0]) | (index["first_id"] > ids[1])
            wanted &= ~((index["first_place"] == index["last_place"]) & outside)
        for number in np.flatnonzero(wanted).tolist():
            rows = self._batch(number)
            start = int(np.searchsorted(rows.places, first, side="left"))
            stop = int(np.searchsorted(rows.places, last, side="right"))
            if start < stop:
                yield _part(rows, slice(start, stop))

    def at(self, indices: NDArray[np.int64]) -> Completions:
        """The completions at `indices`, wherever they lie."""
        ends = self.index["completion"]
        batch_of = np.searchsorted(ends, indices, side="right")
        order = np.argsort(batch_of, kind="stable")
        parts = [Completions(Ragged.of([], np.int32), np.empty(0, np.int32), np.empty(0, "u8"))]
        for number in np.unique(batch_of).tolist():
            wanted = indices[order][batch_of[order] == number] - first_of(ends, number)
            parts.append(Completions.of(self._batch(number)).take(wanted))
        return Completions.concat(parts).take(np.argsort(order))

    @cached_property
    def _batch(self) -> Callable[[int], KeyedRows]:
        return lru_cache(self.held)(self._read)

    def _read(self, number: int) -> KeyedRows:
        return _rows_of(read_batch(self.path, self.index["rows"], number))


@dataclass(frozen=True)
class Completions:
    """Completions of sorted rows."""

    ids: Ragged
    cut: NDArray[np.int32]  # tokens each has lost
    places: NDArray[np.uint64]  # of their prompts

    @staticmethod
    def of(keyed: KeyedRows) -> Completions:
        """Those of some rows."""
        places = np.repeat(keyed.places, np.diff(keyed.rows.branch_offsets))
        return Completions(keyed.rows.completions, keyed.rows.cut, places)

    @staticmethod
    def concat(parts: Sequence[Completions]) -> Completions:
        """Joins several, in order."""
        return Completions(
            Ragged.concat([part.ids for part in parts]),
            np.concatenate([part.cut for part in parts]),
            np.concatenate([part.places for part in parts]),
        )

    def take(self, indices: NDArray[np.int64]) -> Completions:
        """The completions at `indices`, in that order."""
        return Completions(self.ids.take(indices), self.cut[indices], self.places[indices])


def _batched(chunks: Iterable[EncodedChunk], intake: Intake) -> Iterator[list[KeyedRows]]:
    batch: list[KeyedRows] = []
    tokens = 0
    for chunk in chunks:
        intake.count(chunk)
        if not len(chunk.keyed):
            continue
        batch.append(chunk.keyed)
        rows = chunk.keyed.rows
        tokens += TOKENS_PER_BRANCH * len(rows.completions)
        tokens += len(rows.completions.values) + len(rows.prompts.values)
        if tokens >= TOKENS_PER_RUN:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _in_ring_order(parts: list[KeyedRows]) -> KeyedRows:
    """All rows as one sorted block; `parts` is emptied, so that no row is held three times."""
    joined = KeyedRows.concat(parts)
    parts.clear()
    return joined.in_ring_order()


def _merged(
    runs: Sequence[SortedRows],
    notes: Counter[str],
    join: Callable[[KeyedRows], KeyedRows] | None,
) -> Iterator[KeyedRows]:
    """The rows of all runs in ring order, range by range of their keys."""
    tokens = sum(run.prompt_tokens + run.completion_tokens for run in runs)
    tokens += TOKENS_PER_BRANCH * sum(run.num_completions for run in runs)
    num_ranges = 1 + tokens // TOKENS_PER_MERGE
    edges = [(number * 2**64) // num_ranges for number in range(num_ranges + 1)]
    for first, beyond in pairwise(edges):
        parts = [part for run in runs for part in run.within(first, beyond - 1)]
        if parts:
            rows = _in_ring_order(parts)
            yield _number_copies(join(rows) if join else rows, notes)
            del rows  # before the next range is read


def _number_copies(keyed: KeyedRows, notes: Counter[str]) -> KeyedRows:
    """Numbers rows of equal content 0, 1, 2, ... in ring order."""
    row_id = keyed.rows.row_id
    is_first = np.append(True, row_id[1:] != row_id[:-1])
    place = np.arange(len(row_id))
    copy = place - np.maximum.accumulate(np.where(is_first, place, 0))
    notes["rows_that_repeat_another_row"] += int((~is_first).sum())
    return replace(keyed, rows=replace(keyed.rows, copy=copy.astype(np.int32)))


def _entries(
    keyed: KeyedRows, bounds: Sequence[tuple[int, int]], chunks: Sequence[Chunk]
) -> NDArray[Any]:
    """Batches as the index has them, but that rows and completions are counted in each."""
    rows, edges = keyed.rows, np.array(bounds)
    first, last = edges[:, 0], edges[:, 1] - 1
    branches = rows.branch_offsets[edges]
    entries = np.zeros(len(edges), dtype=INDEX)
    entries["rows"] = chunks
    entries["row"] = np.diff(edges)[:, 0]
    entries["completion"] = np.diff(branches)[:, 0]
    entries["prompt_tokens"] = np.diff(rows.prompts.offsets[edges])[:, 0]
    entries["completion_tokens"] = np.diff(rows.completions.offsets[branches])[:, 0]
    entries["first_place"], entries["last_place"] = keyed.places[first], keyed.places[last]
    entries["first_id"], entries["last_id"] = rows.row_id[first], rows.row_id[last]
    return entries


def first_of(ends: NDArray[np.int64], batch: int) -> int:
    """The number at which a batch begins."""
    return int(ends[batch - 1]) if batch else 0


def parts_of(ends: NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[int, slice]]:
    """The batches that hold the numbers `start` to `stop`, and which part of each does."""
    number = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        first, end = first_of(ends, number), min(stop, int(ends[number]))
        yield number, slice(start - first, end - first)
        number, start = number + 1, end


def _part(keyed: KeyedRows, part: slice) -> KeyedRows:
    is_all = part.stop - part.start == len(keyed)
    return keyed if is_all else keyed.take(np.arange(part.start, part.stop))


def _batch_of(keyed: KeyedRows) -> pa.RecordBatch:
    """Rows as Arrow columns over the same memory."""
    rows, keys = keyed.rows, keyed.rows.prompt_keys
    branches = {
        "ids": _lists_of(rows.completions.offsets, _column_of(rows.completions.values)),
        "key": _column_of(keyed.completion_keys),
        "role": _column_of(rows.roles),
        "score": _column_of(rows.scores),
        "cut": _column_of(rows.cut),
    }
    nested = pa.StructArray.from_arrays(list(branches.values()), names=list(branches))
    columns = {
        "place": _column_of(keyed.places),
        "row_id": bytes_of(rows.row_id),
        "copy": _column_of(rows.copy),
        "file": _column_of(rows.file),
        "row": _column_of(rows.row),
        "prompt_key": bytes_of(keys.prompt),
        "split_key": _column_of(keys.split),
        "prompt_sketch": _column_of(keys.sketch),
        "prompt": _lists_of(rows.prompts.offsets, _column_of(rows.prompts.values)),
        "prompt_cut": _column_of(rows.prompt_cut),
        "branches": _lists_of(rows.branch_offsets, nested),
        **{_CARRIED + name: _column_of(values) for name, values in rows.carried.items()},
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _rows_of(batch: pa.RecordBatch) -> KeyedRows:
    """The rows of a batch, over its memory."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    branches = columns["branches"].values
    rows = RowBlock(
        row_id=digests_of(columns["row_id"]),
        copy=numpy_of(columns["copy"]),
        file=numpy_of(columns["file"]),
        row=numpy_of(columns["row"]),
        prompt_keys=PromptKeys(
            digests_of(columns["prompt_key"]),
            numpy_of(columns["split_key"]),
            numpy_of(columns["prompt_sketch"]),
        ),
        prompts=_ragged_of(columns["prompt"]),
        prompt_cut=numpy_of(columns["prompt_cut"]),
        branch_offsets=numpy_of(columns["branches"].offsets),
        completions=_ragged_of(branches.field("ids")),
        roles=numpy_of(branches.field("role")),
        scores=numpy_of(branches.field("score")),
        cut=numpy_of(branches.field("cut")),
        carried={
            name.removeprefix(_CARRIED): numpy_of(column)
            for name, column in columns.items()
            if name.startswith(_CARRIED)
        },
    )
    return KeyedRows(rows, numpy_of(columns["place"]), numpy_of(branches.field("key")))


_CARRIED = "carried."


def _column_of(values: NDArray[Any]) -> pa.Array:
    return arrow_of(values, pa.from_numpy_dtype(values.dtype))


def _lists_of(offsets: NDArray[np.int64], values: pa.Array) -> pa.Array:
    return pa.LargeListArray.from_arrays(_column_of(offsets), values)


def _ragged_of(lists: pa.Array) -> Ragged:
    return Ragged(numpy_of(lists.values), numpy_of(lists.offsets))


Chunk = tuple[int, int, int]


@contextmanager
def new_stream(path: Path) -> Iterator[Callable[[pa.RecordBatch], Chunk]]:
    """A new file of batches, durable at the end of the block; yields what adds one to it."""
    with fs.create(path) as sink:
        head, end = b"", 0

        def append(batch: pa.RecordBatch) -> Chunk:
            nonlocal head, end
            if not head:
                head = batch.schema.serialize().to_pybytes()
                end = sink.write(head)
            message = batch.serialize()
            start, end = end, end + sink.write(message)
            return start, message.size, crc32(message, crc32(head))

        yield append
        sink.write(_END_OF_STREAM)
    fs.fsync(path)


def read_batch(path: Path, chunks: NDArray[Any], number: int) -> pa.RecordBatch:
    """One batch of a file, and the schema before the first: the bytes that were written."""
    start, size, checksum = chunks[number].item()
    content = read_content(path, 0, int(chunks["start"][0])) + read_content(path, start, size)
    if crc32(content) != checksum:
        raise damaged(path)
    return pa.ipc.open_stream(content).read_next_batch()


def read_content(path: Path, start: int = 0, size: int = -1) -> bytes:
    """Bytes of one of these files."""
    with os_errors_as_storage_errors("read", path):
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(size)
        except FileNotFoundError:
            raise damaged(path) from None


def damaged(path: Path) -> CorruptionError:
    """The error of a file that is gone or holds other bytes than were written."""
    return CorruptionError(
        f"{path} is damaged: its bytes are not those that were written (a checksum differs, or it "
        "is gone). Remove this file and run the same command again: rows are prepared once more, "
        "and no finished shard is lost."
    )
