"""Preparing: slices of the data are encoded into files that are divided by key range.

Any processes may encode them, in any order and more than once: a slice ends in one file, the same
bytes whoever writes it, and in one record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...schemas.errors import CorruptionError, StorageError, damaged
from ...schemas.row_keys import InputCounts
from ...stages.data.files import (
    LARGEST_SLICE,
    LEAST_SLICE,
    SLICES,
    Digested,
    InputFile,
    Slice,
    require_same_version,
)
from ...stages.data.slice_encoder import EncodingJob, SliceEncoder
from ...stages.pairing.partition import (
    REMEDY,
    EncodedRows,
    EncodedSlice,
    SliceFile,
    number_of_shards,
    write_slice,
)
from ...stages.storage.cache.cache_folder import WorkFolder
from ...stages.storage.cache.commits import printable
from ...stages.storage.disk import fs
from ...stages.storage.signed_records import SignedRecords
from ...stages.tracking.progress import Progress
from ..executors.executor import one_by_one

RECORDS = SignedRecords(EncodedSlice, remedy=REMEDY)


def joined_slices(slices: Iterable[Slice], total: int) -> tuple[tuple[Slice, ...], ...]:
    """What is encoded into one file: a slice, or small whole files of data up to its size."""
    slices = tuple(slices)
    most = min(max(total // SLICES, LEAST_SLICE), LARGEST_SLICE)
    per_file = Counter(part.file for part in slices)
    joined: list[tuple[Slice, ...]] = []
    room = 0
    for part in slices:
        is_whole_file = per_file[part.file] == 1
        if is_whole_file and joined and part.bytes <= room:
            joined[-1] += (part,)
            room -= part.bytes
        else:
            joined.append((part,))
            room = most - part.bytes if is_whole_file else 0
    return tuple(joined)


@dataclass(frozen=True)
class EncodeTasks:
    """Tokenizes the rows of each slice of the data."""

    work: WorkFolder
    encoding: EncodingJob
    inputs: tuple[InputFile, ...]
    digested: tuple[Digested, ...]
    slices: tuple[tuple[Slice, ...], ...]
    ranges: int

    name = "reading and tokenizing"
    unit = "bytes"
    is_input = True

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each slice, about."""
        return tuple(sum(part.bytes for part in parts) for parts in self.slices)

    @property
    def costs(self) -> tuple[int, ...]:
        """The bytes of each slice, about."""
        return self.sizes

    def is_committed(self, task: int) -> bool:
        """Whether its rows are written."""
        return self._find(task) is not None

    def open(self, progress: Progress) -> Callable[[Iterable[int]], Generator[int]]:
        """A function that makes and commits tasks, and gives how many rows it read for each."""
        encoder = SliceEncoder(self.encoding)

        def make(task: int) -> int:
            rows = self._encode(task, encoder)
            progress.advance(self.sizes[task])
            return rows

        return one_by_one(make)

    def file(self, task: int) -> Path:
        """The file of a slice; its record is beside it."""
        return self.work.encoded / f"{task:08d}.arrow"

    def records(self) -> list[EncodedSlice]:
        """The records of all slices, which are encoded."""
        found = [self._find(task) for task in range(len(self.slices))]
        for task, record in enumerate(found):
            if record is None:
                raise damaged(self.file(task), "it is missing or short", REMEDY)
        return [record for record in found if record]

    def _find(self, task: int) -> EncodedSlice | None:
        """The record of a slice whose file is whole; another process may remove both."""
        path = self.file(task)
        try:
            record = RECORDS.read(path.with_suffix(".json"))
            return record if path.stat().st_size == record.bytes else None
        except (StorageError, CorruptionError, FileNotFoundError):
            return None  # it is encoded again

    def _encode(self, task: int, encoder: SliceEncoder) -> int:
        path, counts = self.file(task), InputCounts()
        parts = self.slices[task]
        with fs.new_file(path, replaces=True) as sink:
            rows = (keyed for part in parts for keyed in encoder.rows(self.inputs, part, counts))
            facts = write_slice(sink, rows, self.ranges)
            for part in parts:
                require_same_version(self.inputs[part.file], self.digested[part.file])
        record = EncodedSlice(
            bytes=path.stat().st_size,
            counts=tuple(map(tuple, facts.counts)),
            rows_in=tuple(counts.rows_per_file[part.file] for part in parts),
            notes=dict(counts.notes),
            reasons=dict(counts.reasons),
            rejected=tuple(replace(one, detail=printable(one.detail)) for one in counts.rejected),
            completions=facts.completions,
            prompt_tokens=facts.prompt_tokens,
            completion_tokens=facts.completion_tokens,
            largest_prompt=facts.largest_prompt,
            texts=(f"{facts.lowest:016x}", f"{facts.highest:016x}"),
        )
        RECORDS.replace(path.with_suffix(".json"), record)
        return counts.rows_in


@dataclass(frozen=True)
class Encoded:
    """The encoded slices of all data, by their records."""

    tasks: EncodeTasks
    records: list[EncodedSlice]

    @cached_property
    def counts(self) -> InputCounts:
        """The counts of all rows, and the first of the rejected ones."""
        counts = InputCounts()
        for parts, first_row, one in zip(
            self.tasks.slices, self._first_rows, self.records, strict=True
        ):
            for part, rows in zip(parts, one.rows_in, strict=True):
                counts.rows_per_file[part.file] += rows
            counts.notes.update(one.notes)
            counts.reasons.update(one.reasons)
            counts.keep(replace(bad, row=bad.row + first_row) for bad in one.rejected)
        return counts

    def shards(self, asked: int) -> tuple[int, ...]:
        """The rows of each shard, of so many, or of as many as the data ask for."""
        rows: NDArray[np.int64] = np.zeros(self.tasks.ranges, np.int64)
        for one in self.records:
            rows += np.sum(one.counts, axis=0, dtype=np.int64) if one.counts else 0
        shards = number_of_shards(self.tasks.ranges, int(rows.sum()), asked)
        return tuple(rows.reshape(shards, -1).sum(axis=1).tolist())

    def rows(self, *, shards: int, prompt_side: str | None = None) -> EncodedRows:
        """What reads the rows of a shard; with `prompt_side` rows of one prompt are joined."""
        ranges = self.tasks.ranges
        files = [
            SliceFile(
                self.tasks.file(task), np.array(one.counts, np.int32).reshape(-1, ranges), first
            )
            for task, (one, first) in enumerate(zip(self.records, self._first_rows, strict=True))
        ]
        return EncodedRows(files, shards, prompt_side)

    @cached_property
    def _first_rows(self) -> list[int]:
        """How many rows its file of data has ahead of each slice."""
        first_rows: list[int] = []
        first, file = 0, 0
        for (part, *_), one in zip(self.tasks.slices, self.records, strict=True):
            first = first if part.file == file else 0
            first_rows.append(first)
            first, file = first + one.rows_in[0], part.file
        return first_rows
