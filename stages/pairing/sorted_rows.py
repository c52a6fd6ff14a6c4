"""Rows in ring order, on disk: Arrow streams of batches, an index of them, what is read by it.

Rows wait in these files for hours while they are scored, so every batch has a CRC-32, which is
compared whenever it is read. What stands behind the end of a stream is for those who wrote it;
other Arrow readers stop there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.arrow_columns import Values, arrow_of, lists_over, numpy_of, ragged_of
from ...schemas.columns import Ragged
from ...schemas.errors import os_errors_as_storage_errors
from ...schemas.row_keys import KeyedRows
from ...schemas.rows import PromptKeys, RowBlock
from ..storage.cache.spool import damaged_part

# Where a batch is in its file: the schema's bytes at the file's beginning, and its own.
CHUNK = np.dtype([("head", "<u4"), ("start", "<u8"), ("size", "<u8"), ("crc", "<u4")])
Chunk = tuple[int, int, int, int]
INDEX = np.dtype(
    [
        ("rows", CHUNK),
        ("partners", CHUNK),
        ("file", "<u4"),  # which of the files the batch is in
        ("row", "<i8"),  # one past the batch's last row
        ("completion", "<i8"),  # one past its last completion
        ("prompt_tokens", "<i8"),
        ("completion_tokens", "<i8"),
        ("first_place", "<u8"),
        ("last_place", "<u8"),
        ("first_id", "S16"),
        ("last_id", "S16"),
    ]
)
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class BatchStream:
    """Writes batches of one schema to the beginning of a file."""

    def __init__(self, write: Callable[[bytes | memoryview], object]) -> None:
        self._write = write
        self._head = b""
        self.bytes = 0

    def append(self, batch: pa.RecordBatch) -> Chunk:
        """Writes one batch; returns where it is."""
        if not self._head:
            self._head = batch.schema.serialize().to_pybytes()
            self._add(self._head)
        message, start = memoryview(batch.serialize()), self.bytes
        self._add(message)
        return len(self._head), start, len(message), crc32(message, crc32(self._head))

    def end(self) -> None:
        """Ends the stream."""
        self._add(_END_OF_STREAM)

    def _add(self, content: bytes | memoryview) -> None:
        self._write(content)
        self.bytes += len(content)


def read_batch(path: Path, chunk: NDArray[Any]) -> pa.RecordBatch:
    """One batch of a file, and the schema at its beginning: the bytes that were written."""
    head, start, size, checksum = chunk.item()
    with os_errors_as_storage_errors("read", path):
        try:
            with path.open("rb") as file:
                content = file.read(head)
                file.seek(start)
                content += file.read(size)
        except FileNotFoundError:
            raise damaged_part(path) from None
    if crc32(content) != checksum:
        raise damaged_part(path)
    return pa.ipc.open_stream(content).read_next_batch()


def append_rows(
    stream: BatchStream, keyed: KeyedRows, bounds: list[tuple[int, int]]
) -> NDArray[Any]:
    """Writes rows as batches; returns their entries, which count the rows of each batch alone."""
    entries = np.empty(len(bounds), dtype=INDEX)
    for number, (start, stop) in enumerate(bounds):
        batch = part_of(keyed, slice(start, stop))
        entries[number] = _entry(batch, stream.append(_batch_of(batch)))
    return entries


def joined_index(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """The index of several files as one: rows and completions are counted through all of them."""
    index = np.concatenate([np.empty(0, dtype=INDEX), *parts])
    index["file"] = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    for name in ("row", "completion"):
        index[name] = np.cumsum(index[name])
    return index


@dataclass(frozen=True)
class SortedRows:
    """Rows in ring order, in files one after another."""

    files: tuple[Path, ...]
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
        return map(self.batch, range(len(self.index)))

    def read(self, start: int, stop: int) -> KeyedRows:
        """Rows `start` to `stop`."""
        spans = parts_of(self.index["row"], start, stop)
        return KeyedRows.concat([part_of(self.batch(number), part) for number, part in spans])

    def first_completion(self, row: int) -> int:
        """The number of the first completion of a row."""
        ((number, part),) = parts_of(self.index["row"], row, row + 1)
        branches = self.batch(number).rows.branch_offsets
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
            rows = self.batch(number)
            start = int(np.searchsorted(rows.ring_keys, first, side="left"))
            stop = int(np.searchsorted(rows.ring_keys, last, side="right"))
            if start < stop:
                yield part_of(rows, slice(start, stop))

    def at(self, indices: NDArray[np.int64]) -> Completions:
        """The completions at `indices`, in that order."""
        ends = self.index["completion"]
        batch_of = np.searchsorted(ends, indices, side="right")
        order = np.argsort(batch_of, kind="stable")
        ids, cuts, places = [Ragged.of([], np.int32)], [np.empty(0, "i4")], [np.empty(0, "u8")]
        for number in np.unique(batch_of).tolist():
            keyed = self.batch(number)
            wanted = indices[order][batch_of[order] == number] - first_of(ends, number)
            ids.append(keyed.rows.completions.take(wanted))
            cuts.append(keyed.rows.cut[wanted])
            places.append(keyed.ring_keys[keyed.rows.row_of_branch[wanted]])
        back = np.argsort(order)
        return Completions(
            Ragged.concat(ids).take(back), np.concatenate(cuts)[back], np.concatenate(places)[back]
        )

    @cached_property
    def batch(self) -> Callable[[int], KeyedRows]:
        """Reads a batch, unless it is held."""
        return lru_cache(self.held)(self._read)

    def __getstate__(self) -> dict[str, Any]:
        """Without the batches that are held: another process reads its own."""
        return {name: value for name, value in vars(self).items() if name != "batch"}

    def _read(self, number: int) -> KeyedRows:
        entry = self.index[number]
        return _rows_of(read_batch(self.files[entry["file"]], entry["rows"]))


@dataclass(frozen=True)
class Completions:
    """Completions of sorted rows."""

    ids: Ragged
    cut: NDArray[np.int32]  # tokens each has lost
    places: NDArray[np.uint64]  # of their prompts


def _entry(keyed: KeyedRows, chunk: Chunk) -> tuple[Any, ...]:
    """A batch as the index has it, but that rows and completions are counted in each."""
    rows = keyed.rows
    return (
        chunk,
        (0, 0, 0, 0),  # its partners are not chosen yet
        0,
        len(rows),
        len(rows.completions),
        len(rows.prompts.values),
        len(rows.completions.values),
        *keyed.ring_keys[[0, -1]],
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


def part_of(keyed: KeyedRows, part: slice) -> KeyedRows:
    """Some consecutive rows."""
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
    row: list[Values] = [keyed.ring_keys, rows.row_id, rows.copy, rows.file, rows.row]
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
