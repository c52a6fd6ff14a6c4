"""The tasks of preparing: slices of the data are encoded, then key ranges are arranged.

Any processes may make them, in any order and more than once: a task ends in one file, which is
named by its content, and in one commit, which names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ...schemas.errors import CorruptionError
from ...schemas.preparing import ArrangedPart, EncodedPart
from ...schemas.row_keys import InputCounts
from ...stages.data.files import Digested, InputFile, Slice, require_same_version
from ...stages.data.slice_encoder import EncodingJob, SliceEncoder
from ...stages.pairing.long_form import merge_same_prompts
from ...stages.pairing.ring import Ring, write_range
from ...stages.sort.key_ranges import (
    PartitionedRows,
    sorted_partition,
    with_copies_numbered,
    write_partitions,
)
from ...stages.storage.bucket.objects import Location
from ...stages.storage.cache.commits import printable
from ...stages.storage.cache.spool import damaged_part, find_commit, new_part, put_commit
from ...stages.tracking.progress import Progress
from ..executors.executor import one_by_one


@dataclass(frozen=True)
class Preparation:
    """Shared inputs of the preparation tasks, the same in every process."""

    ring: Ring
    plan: Location  # once it is written, the encoded rows of a whole ring are no longer needed
    encoding: EncodingJob
    inputs: tuple[InputFile, ...]
    digested: tuple[Digested, ...]
    slices: tuple[Slice, ...]
    num_ranges: int
    prompt_side: str

    def encoded_parts(self) -> Iterator[tuple[Slice, int, EncodedPart]]:
        """Each slice with its first row in its file, and what was committed of it."""
        first_row, file = 0, 0
        for number, part in enumerate(self.slices):
            commit = self.ring.spool.encoded(number)
            found = find_commit(EncodedPart, commit)
            if found is None:
                raise damaged_part(commit)
            first_row = first_row if part.file == file else 0
            yield part, first_row, found
            first_row, file = first_row + found.rows_in, part.file

    def input_counts(self) -> InputCounts:
        """The counts of all encoded slices."""
        counts = InputCounts()
        for part, first_row, found in self.encoded_parts():
            counts.add(found, file=part.file, first_row=first_row)
        return counts


@dataclass(frozen=True)
class EncodeTasks:
    """Tokenizes the rows of each slice of the data."""

    preparation: Preparation
    name: str = "reading and tokenizing"
    unit: str = "bytes"
    is_input: bool = True

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each slice, about."""
        return tuple(part.bytes for part in self.preparation.slices)

    @property
    def costs(self) -> tuple[int, ...]:
        """The bytes of each slice, about."""
        return self.sizes

    def is_committed(self, task: int) -> bool:
        """Whether its rows are written, or no longer needed."""
        ring, plan = self.preparation.ring, self.preparation.plan
        if find_commit(EncodedPart, ring.spool.encoded(task)):
            return True
        return ring.is_whole and plan.exists()

    def open(self, progress: Progress) -> Callable[[Iterable[int]], Generator[int]]:
        """A function that makes and commits tasks, and gives how many rows it read for each."""
        encoder = SliceEncoder(self.preparation.encoding)

        def make(task: int) -> int:
            rows = _encode(self.preparation, task, encoder)
            progress.advance(self.sizes[task])
            return rows

        return one_by_one(make)


def _encode(preparation: Preparation, task: int, encoder: SliceEncoder) -> int:
    part, counts = preparation.slices[task], InputCounts()
    commit = preparation.ring.spool.encoded(task)
    with new_part(commit) as file:
        rows = encoder.rows(preparation.inputs, part, counts)
        directory = write_partitions(file, rows, preparation.num_ranges)
        require_same_version(preparation.inputs[part.file], preparation.digested[part.file])
    record = EncodedPart(
        file=file.file,
        directory=directory,
        rows_in=counts.rows_in,
        notes=dict(counts.notes),
        reasons=dict(counts.reasons),
        rejected=tuple(replace(one, detail=printable(one.detail)) for one in counts.rejected),
    )
    put_commit(commit, record)
    return counts.rows_in


@dataclass(frozen=True)
class ArrangeTasks:
    """Sorts the encoded rows of each key range."""

    preparation: Preparation
    name: str = "sorting"
    unit: str = "key ranges"
    is_input: bool = True

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """One for each range: keys are hashes, so all hold about as much."""
        return (1,) * self.preparation.num_ranges

    @property
    def costs(self) -> tuple[int, ...]:
        """One for each range."""
        return self.sizes

    def is_committed(self, task: int) -> bool:
        """Whether its range of the ring is written."""
        return find_commit(ArrangedPart, self.preparation.ring.spool.arranged(task)) is not None

    def open(self, progress: Progress) -> Callable[[Iterable[int]], Generator[int]]:
        """A function that makes and commits tasks, and gives how many rows it sorted for each."""
        files: list[PartitionedRows] = []

        def make(task: int) -> int:
            rows = 0
            try:
                files.extend(() if files else _partitions(self.preparation))
                rows = _arrange(self.preparation, task, files)
            except CorruptionError:
                if not self.is_committed(task):  # else what it needs went when another had made it
                    raise
            progress.advance(self.sizes[task])
            return rows

        return one_by_one(make)


def _partitions(preparation: Preparation) -> list[PartitionedRows]:
    folder, num_ranges = preparation.ring.spool.encoded(0).parent, preparation.num_ranges
    files: list[PartitionedRows] = []
    file = start = stop = 0
    for part, first_row, found in preparation.encoded_parts():
        if part.file != file:
            file, start = part.file, stop
        stop = start + first_row + found.rows_in
        path = folder / found.file.name
        files.append(PartitionedRows(path, found.directory, num_ranges, start + first_row, start))
    return files


def _arrange(preparation: Preparation, task: int, files: list[PartitionedRows]) -> int:
    notes = Counter[str]()
    commit = preparation.ring.spool.arranged(task)
    with new_part(commit) as file:
        rows = sorted_partition(files, task)
        if rows and preparation.encoding.shape.declared.is_long:
            rows = merge_same_prompts(rows, notes, prompt_side=preparation.prompt_side)
        if rows:
            rows = with_copies_numbered(rows, notes)
        record = write_range(file, rows, notes)
    put_commit(commit, record)
    return record.rows
