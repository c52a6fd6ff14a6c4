"""The ring: rows in ring order, in one file for each key range, and all their KL partners."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.arrow_columns import arrow_of, numpy_of
from ...schemas.preparing import ArrangedPart, RingRecord
from ...schemas.row_keys import KeyedRows
from ...schemas.rows import Role
from ..sort.pages import PageWriter, read_directory, read_pages
from ..sort.sorted_rows import (
    ROWS_PAGE,
    SortedRows,
    first_of,
    joined_directory,
    pages_between,
    write_rows,
)
from ..storage.cache.spool import (
    NewPart,
    Spool,
    bytes_of,
    damaged_part,
    find_commit,
    new_map,
    new_part,
    put_commit,
    read_commit,
)
from .kl_partners import choose_partners

PAGES_HELD = 8  # of the rows that are looked up

_KEYS = np.dtype("<u8")  # two of each completion: its prompt's ring key, and the key of its ids
_SIZES = np.dtype("<i8")  # two of each row: tokens of its prompt, and of all its completions


@dataclass(frozen=True)
class Ring:
    """All rows in ring order, on disk, with their KL partners."""

    spool: Spool
    num_pairs: int

    @property
    def is_whole(self) -> bool:
        """Whether it is complete, with all of its files."""
        record = find_commit(RingRecord, self.spool.ring)
        return record is not None and all(map(Path.exists, self._files(record)))

    @cached_property
    def record(self) -> RingRecord:
        """The commit of a complete ring."""
        return read_commit(RingRecord, self.spool.ring)

    @cached_property
    def rows(self) -> SortedRows:
        """The rows of a complete ring."""
        directory = read_directory(self._file, self.record.rows, ROWS_PAGE)
        return SortedRows(tuple(self._files(self.record)), directory, PAGES_HELD)

    def partners(self, first: int, last: int) -> NDArray[np.int64]:
        """Partners of completions `first` to `last`: shape (num_pairs, last - first)."""
        found = np.empty((self.num_pairs, last - first), dtype=np.int64)
        wanted = [*pages_between(self.rows.directory["completion"], first, last)]
        if self.num_pairs:
            pages = read_pages(self._file, self._partners[[number for number, _ in wanted]])
            start = 0
            for page, (_, part) in zip(pages, wanted, strict=True):
                end = start + part.stop - part.start
                found[:, start:end] = [numpy_of(column)[part] for column in page.columns]
                start = end
        return found

    def sizes(self) -> Iterator[NDArray[np.int64]]:
        """The tokens of each row's prompt and of its completions: (2, rows), range by range."""
        for number in range(len(self.record.parts)):
            yield _RangeFile(self.spool, number).sizes()

    @cached_property
    def _partners(self) -> NDArray[Any]:
        """The directory of the partners: the pages of a page of rows have its number."""
        return read_directory(self._file, self.record.partners)

    @property
    def _file(self) -> Path:
        return self.spool.ring.with_name(self.record.file.name)

    def _files(self, record: RingRecord) -> Iterator[Path]:
        folder = self.spool.arranged(0).parent
        return (folder / part.name for part in record.parts)


def write_range(part: NewPart, keyed: KeyedRows | None, notes: Counter[str]) -> ArrangedPart:
    """Writes the rows of a key range in ring order, if there are any.

    Behind the pages are what pairing needs of the completions and the sizes of the rows.
    """
    pages = PageWriter(part)
    keys, sizes = np.empty((2, 0), _KEYS), np.empty((2, 0), _SIZES)
    if keyed:
        write_rows(pages, keyed)
        block = keyed.rows
        keys = np.stack([keyed.ring_keys[block.row_of_branch], keyed.completion_keys])
        tokens = np.diff(block.completions.offsets[block.branch_offsets])
        sizes = np.stack([block.prompts.lengths, tokens])
        notes["pairs_in_both_orders"] += _in_both_orders(keyed)
    return ArrangedPart(
        directory=pages.end(),
        keys=part.write_block(keys.tobytes()),
        sizes=part.write_block(sizes.tobytes()),
        file=part.file,
        rows=sizes.shape[1],
        completions=keys.shape[1],
        notes=dict(notes),
    )


def _in_both_orders(keyed: KeyedRows) -> int:
    """How many pairs of completions are there as chosen and rejected and the other way round."""
    rows = keyed.rows
    starts = rows.branch_offsets[:-1][np.diff(rows.branch_offsets) == 2]
    firsts = starts[(rows.roles[starts] == Role.CHOSEN) & (rows.roles[starts + 1] == Role.REJECTED)]
    chosen, rejected = keyed.completion_keys[firsts], keyed.completion_keys[firsts + 1]
    prompts, is_turned = keyed.ring_keys[rows.row_of_branch[firsts]], chosen > rejected
    pairs = np.stack([prompts, np.minimum(chosen, rejected), np.maximum(chosen, rejected)])
    order = np.lexsort((is_turned, *pairs))
    pairs, is_turned = pairs[:, order], is_turned[order]
    is_same = (pairs[:, 1:] == pairs[:, :-1]).all(axis=0)
    return int((is_same & (is_turned[1:] != is_turned[:-1])).sum())


class _RangeFile:
    """Keys, sizes and directory of a key range, which its file has behind the pages."""

    def __init__(self, spool: Spool, number: int) -> None:
        commit = spool.arranged(number)
        self.part = read_commit(ArrangedPart, commit)
        self._path = commit.with_name(self.part.file.name)

    def keys(self) -> NDArray[np.uint64]:
        """(2, completions)."""
        return np.frombuffer(bytes_of(self._path, self.part.keys), dtype=_KEYS).reshape(2, -1)

    def sizes(self) -> NDArray[np.int64]:
        """(2, rows)."""
        return np.frombuffer(bytes_of(self._path, self.part.sizes), dtype=_SIZES).reshape(2, -1)

    def directory(self) -> NDArray[Any]:
        """The entries of its pages."""
        return read_directory(self._path, self.part.directory, ROWS_PAGE)


def complete_ring(ring: Ring, num_ranges: int) -> None:
    """Pairs every completion of all ranges, and commits the ring."""
    ranges = [_RangeFile(ring.spool, number) for number in range(num_ranges)]
    rows = joined_directory([file.directory() for file in ranges])
    notes = Counter[str]()
    for file in ranges:
        notes.update(file.part.notes)
    with new_part(ring.spool.ring) as part:
        pages = PageWriter(part)
        if ring.num_pairs:
            _write_partners(ring, ranges, rows["completion"], pages, notes)
        record = RingRecord(
            partners=pages.end(),
            rows=part.write_block(rows.tobytes()),
            file=part.file,
            parts=tuple(file.part.file for file in ranges),
            notes=dict(notes),
        )
    put_commit(ring.spool.ring, record)


def _write_partners(
    ring: Ring,
    ranges: Sequence[_RangeFile],
    ends: NDArray[np.int64],
    pages: PageWriter,
    notes: Counter[str],
) -> None:
    """Chooses the partners, over keys in a file; those of a page of rows are a page."""
    file, total = ring.spool.root / "keys.bin", first_of(ends, len(ends))
    with new_map(file, 8 * (2 + ring.num_pairs) * total) as mapped:
        numbers = np.frombuffer(mapped, dtype=np.int64).reshape(2 + ring.num_pairs, total)
        keys, partners = numbers[:2].view(np.uint64), numbers[2:]
        forget = partial(mapped.madvise, mmap.MADV_DONTNEED)
        for own, range_file in _with_completions(ranges):
            keys[:, own] = range_file.keys()
            forget()
        repeats = choose_partners(keys[0], keys[1], list(partners), forget=forget)
        names = [f"partner_{k + 1}" for k in range(ring.num_pairs)]
        for number, end in enumerate(ends.tolist()):
            own = slice(first_of(ends, number), end)
            chosen = [each[own].copy() for each in partners]
            if any(not _are_mismatched(each, keys[0], own) for each in chosen):
                raise damaged_part(file)
            columns = [arrow_of(each, pa.int64()) for each in chosen]
            pages.append(pa.record_batch(columns, names))
            forget()
        for own, range_file in _with_completions(ranges):
            if crc32(keys[:, own].tobytes()) != range_file.part.keys.crc:
                raise damaged_part(file)
            forget()
    notes["mismatched_completions_used_twice"] += repeats.used_twice
    notes["mismatched_completions_met_again_by_the_same_row"] += repeats.met_again


def _with_completions(ranges: Sequence[_RangeFile]) -> Iterator[tuple[slice, _RangeFile]]:
    """Each range, and which completions of the ring are in it."""
    first = 0
    for file in ranges:
        stop = first + file.part.completions
        yield slice(first, stop), file
        first = stop


def _are_mismatched(partners: NDArray[np.int64], prompts: NDArray[np.uint64], own: slice) -> bool:
    """Whether the partners of some completions are completions of other prompts."""
    are_there = bool(((partners >= 0) & (partners < len(prompts))).all())
    return are_there and bool((prompts[partners] != prompts[own]).all())
