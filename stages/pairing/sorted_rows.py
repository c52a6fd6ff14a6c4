"""Sorts rows out of core into ring order, and keeps them in files that are read batch by batch.

Each file is an Arrow IPC stream, which any Arrow reader opens. Rows wait in it for hours while they
are scored, so every batch has a CRC-32, which is compared whenever the batch is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
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
from ..storage.shards import Values, arrow_of, group_bounds, lists_over, numpy_of, ragged_of

TOKENS_PER_RUN = 8 * 1024 * 1024
TOKENS_PER_MERGE = 8 * 1024 * 1024
# Each range of keys reads the batches at its edges from every run: few of a run's, if it has many.
TOKENS_PER_BATCH_OF_A_RUN = TOKENS_PER_RUN // 128
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
    bounds = partial(group_bounds, tokens=TOKENS_PER_BATCH_OF_A_RUN)
    return [
        write_rows(folder / f"run-{number:05d}.arrows", map(_in_ring_order, [batch]), bounds)
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


def write_rows(
    path: Path,
    parts: Iterable[KeyedRows],
    bounds: Callable[[RowBlock], list[tuple[int, int]]] = group_bounds,
) -> SortedRows:
    """Writes rows that arrive in ring order."""
    entries = bytearray()
    with new_stream(path) as append:
        for keyed in parts:
            for start, stop in bounds(keyed.rows):
                batch = _part(keyed, slice(start, stop))
                entry = _entry(batch, append(_batch_of(batch)))
                entries += np.array(entry, dtype=INDEX).tobytes()
            del keyed, batch  # before the next part is made
    index = np.frombuffer(entries, dtype=INDEX)
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
        """The rows whose places are between two, both included, in bounded parts.

        With `ids`, batches whose rows are all of one prompt and outside of them are left out.
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
        """The completions at `indices`, in that order."""
        ends = self.index["completion"]
        batch_of = np.searchsorted(ends, indices, side="right")
        order = np.argsort(batch_of, kind="stable")
        ids, cuts, places = [Ragged.of([], np.int32)], [np.empty(0, "i4")], [np.empty(0, "u8")]
        for number in np.unique(batch_of).tolist():
            keyed = self._batch(number)
            wanted = indices[order][batch_of[order] == number] - first_of(ends, number)
            ids.append(keyed.rows.completions.take(wanted))
            cuts.append(keyed.rows.cut[wanted])
            places.append(keyed.places[keyed.rows.row_of_branch[wanted]])
        back = np.argsort(order)
        return Completions(
            Ragged.concat(ids).take(back), np.concatenate(cuts)[back], np.concatenate(places)[back]
        )

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


def _entry(keyed: KeyedRows, chunk: Chunk) -> tuple[Any, ...]:
    """A batch as the index has it, but that rows and completions are counted in each."""
    rows = keyed.rows
    return (
        chunk,
        (0, 0, 0),  # its partners are not chosen yet
        len(rows),
        len(rows.completions),
        len(rows.prompts.values),
        len(rows.completions.values),
        *keyed.places[[0, -1]],
        *rows.row_id[[0, -1]],
    )


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


_CARRIED = "carried."
_IDS = pa.list_(pa.int32())
_BRANCH = {
    "ids": _IDS,
    "key": pa.uint64(),
    "role": pa.int8(),
    "score": pa.float64(),
    "cut": pa.int32(),
}
_ROW = {
    "place": pa.uint64(),
    "row_id": pa.binary(16),
    "copy": pa.int32(),
    "file": pa.uint64(),
    "row": pa.int64(),
    "prompt_key": pa.binary(16),
    "split_key": pa.uint64(),
    "prompt_sketch": pa.uint64(),
    "prompt": _IDS,
    "prompt_cut": pa.int32(),
}


def _batch_of(keyed: KeyedRows) -> pa.RecordBatch:
    """Rows as Arrow columns: those of _ROW, the branches, and what they carry."""
    rows, keys = keyed.rows, keyed.rows.prompt_keys
    branch: list[Values] = [rows.completions, keyed.completion_keys]
    branch += [rows.roles, rows.scores, rows.cut]
    row: list[Values] = [keyed.places, rows.row_id, rows.copy, rows.file, rows.row]
    row += [keys.prompt, keys.split, keys.sketch, rows.prompts, rows.prompt_cut]
    nested = pa.StructArray.from_arrays(
        list(map(arrow_of, branch, _BRANCH.values())), list(_BRANCH)
    )
    columns = [
        *map(arrow_of, row, _ROW.values()),
        lists_over(rows.branch_offsets, nested, pa.list_(nested.type)),
        *(arrow_of(values, pa.float64()) for values in rows.carried.values()),
    ]
    names = [*_ROW, "branches", *(_CARRIED + name for name in rows.carried)]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _rows_of(batch: pa.RecordBatch) -> KeyedRows:
    """The rows of a batch, over its memory."""
    row = dict(zip(_ROW, batch.columns, strict=False))
    branches, *carried = batch.columns[len(_ROW) :]
    names = [name.removeprefix(_CARRIED) for name in batch.schema.names[len(_ROW) + 1 :]]
    branch = dict(zip(_BRANCH, branches.values.flatten(), strict=True))
    numbers = {name: numpy_of(each) for name, each in (row | branch).items() if each.type != _IDS}
    rows = RowBlock(
        row_id=numbers["row_id"],
        copy=numbers["copy"],
        file=numbers["file"],
        row=numbers["row"],
        prompt_keys=PromptKeys(
            numbers["prompt_key"], numbers["split_key"], numbers["prompt_sketch"]
        ),
        prompts=ragged_of(row["prompt"]),
        prompt_cut=numbers["prompt_cut"],
        branch_offsets=numpy_of(branches.offsets).astype(np.int64),
        completions=ragged_of(branch["ids"]),
        roles=numbers["role"],
        scores=numbers["score"],
        cut=numbers["cut"],
        carried=dict(zip(names, map(numpy_of, carried), strict=True)),
    )
    return KeyedRows(rows, numbers["place"], numbers["key"])


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
    """The error of a file that is missing or holds other bytes than were written."""
    return CorruptionError(
        f"{path} is damaged: its bytes are not those that were written (a checksum differs, or it "
        "is missing). Remove this file and run the same command again: rows are prepared again, "
        "and no finished shard is lost."
    )
