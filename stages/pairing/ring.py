"""The ring: rows in ring order, in one file for each key range, and all their KL partners."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from ..storage.cache.shards import group_bounds
from ..storage.cache.spool import (
    NewPart,
    Spool,
    damaged_part,
    find_commit,
    new_map,
    new_part,
    put_commit,
    read_commit,
    read_part,
)
from .kl_partners import choose_partners
from .sorted_rows import (
    INDEX,
    BatchStream,
    SortedRows,
    append_rows,
    first_of,
    joined_index,
    parts_of,
    read_batch,
)

BATCHES_HELD = 8  # of the rows that are looked up

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
        record = self.record
        size = record.batches * INDEX.itemsize
        index = _read(self._file, record.file.bytes - size, size, record.index_crc)
        files = tuple(self._files(record))
        return SortedRows(files, np.frombuffer(index, dtype=INDEX), BATCHES_HELD)

    def partners(self, first: int, last: int) -> NDArray[np.int64]:
        """Partners of completions `first` to `last`: shape (num_pairs, last - first)."""
        found = np.empty((self.num_pairs, last - first), dtype=np.int64)
        if self.num_pairs:
            start = 0
            for number, part in parts_of(self.rows.index["completion"], first, last):
                batch = read_batch(self._file, self.rows.index["partners"][number])
                end = start + part.stop - part.start
                found[:, start:end] = [numpy_of(column)[part] for column in batch.columns]
                start = end
        return found

    def sizes(self) -> Iterator[NDArray[np.int64]]:
        """The tokens of each row's prompt and of its completions: (2, rows), range by range."""
        for number in range(len(self.record.parts)):
            yield _RangeFile(self.spool, number).sizes()

    @property
    def _file(self) -> Path:
        return self.spool.ring.with_name(self.record.file.name)

    def _files(self, record: RingRecord) -> Iterator[Path]:
        folder = self.spool.arranged(0).parent
        return (folder / part.name for part in record.parts)


def write_range(part: NewPart, rows: Iterable[KeyedRows], notes: Counter[str]) -> ArrangedPart:
    """Writes the rows of a key range, which arrive in ring order.

    Behind the batches are what pairing needs of the completions, the sizes of the rows, the index.
    """
    stream = BatchStream(part.write)
    index, keys, sizes = [np.empty(0, INDEX)], [np.empty((2, 0), _KEYS)], [np.empty((2, 0), _SIZES)]
    for keyed in rows:
        index.append(append_rows(stream, keyed, group_bounds(keyed.rows)))
        block = keyed.rows
        prompts = np.repeat(keyed.ring_keys, np.diff(block.branch_offsets))
        keys.append(np.stack([prompts, keyed.completion_keys]))
        tokens = np.diff(block.completions.offsets[block.branch_offsets])
        sizes.append(np.stack([block.prompts.lengths, tokens]))
        del keyed, block  # before the next part is made
    stream.end()
    behind = [np.concatenate(keys, axis=1), np.concatenate(sizes, axis=1), np.concatenate(index)]
    contents = [each.tobytes() for each in behind]
    for content in contents:
        part.write(content)
    keys_crc, sizes_crc, index_crc = map(crc32, contents)
    return ArrangedPart(
        file=part.file,
        batches=len(behind[2]),
        rows=behind[1].shape[1],
        completions=behind[0].shape[1],
        keys_crc=keys_crc,
        sizes_crc=sizes_crc,
        index_crc=index_crc,
        notes=dict(notes),
    )


class _RangeFile:
    """Keys, sizes and index of a key range, which its file has behind the batches."""

    def __init__(self, spool: Spool, number: int) -> None:
        commit = spool.arranged(number)
        self.part = read_commit(ArrangedPart, commit)
        self.path = commit.with_name(self.part.file.name)
        self._index = self.part.file.bytes - self.part.batches * INDEX.itemsize
        self._sizes = self._index - 2 * self.part.rows * _SIZES.itemsize
        self._keys = self._sizes - 2 * self.part.completions * _KEYS.itemsize

    def keys(self) -> NDArray[np.uint64]:
        """(2, completions)."""
        content = _read(self.path, self._keys, self._sizes - self._keys, self.part.keys_crc)
        return np.frombuffer(content, dtype=_KEYS).reshape(2, -1)

    def sizes(self) -> NDArray[np.int64]:
        """(2, rows)."""
        content = _read(self.path, self._sizes, self._index - self._sizes, self.part.sizes_crc)
        return np.frombuffer(content, dtype=_SIZES).reshape(2, -1)

    def index(self) -> NDArray[Any]:
        """The entries of its batches."""
        size = self.part.file.bytes - self._index
        return np.frombuffer(_read(self.path, self._index, size, self.part.index_crc), dtype=INDEX)


def complete_ring(ring: Ring, num_ranges: int) -> None:
    """Pairs every completion of all ranges, and commits the ring."""
    ranges = [_RangeFile(ring.spool, number) for number in range(num_ranges)]
    index = joined_index([file.index() for file in ranges])
    notes = Counter[str]()
    for file in ranges:
        notes.update(file.part.notes)
    with new_part(ring.spool.ring) as part:
        stream = BatchStream(part.write)
        if ring.num_pairs:
            _write_partners(ring, ranges, index, stream, notes)
        stream.end()
        content = index.tobytes()
        part.write(content)
    record = RingRecord(
        file=part.file,
        batches=len(index),
        index_crc=crc32(content),
        parts=tuple(file.part.file for file in ranges),
        notes=dict(notes),
    )
    put_commit(ring.spool.ring, record)


def _write_partners(
    ring: Ring,
    ranges: Sequence[_RangeFile],
    index: NDArray[Any],
    stream: BatchStream,
    notes: Counter[str],
) -> None:
    """Chooses the partners, over keys in a file, and enters their batches in the index."""
    file, ends = ring.spool.root / "keys.bin", index["completion"]
    total = first_of(ends, len(index))
    with new_map(file, 8 * (2 + ring.num_pairs) * total) as mapped:
        numbers = np.frombuffer(mapped, dtype=np.int64).reshape(2 + ring.num_pairs, total)
        keys, partners = numbers[:2].view(np.uint64), numbers[2:]
        forget = partial(mapped.madvise, mmap.MADV_DONTNEED)
        for span, range_file in _spans(ranges):
            keys[:, span] = range_file.keys()
            forget()
        repeats = choose_partners(keys[0], keys[1], list(partners), forget=forget)
        names = [f"partner_{k + 1}" for k in range(ring.num_pairs)]
        for number, end in enumerate(ends.tolist()):
            span = slice(first_of(ends, number), end)
            chosen = [each[span].copy() for each in partners]
            if any(not _are_mismatched(each, keys[0], span) for each in chosen):
                raise damaged_part(file)
            columns = [arrow_of(each, pa.int64()) for each in chosen]
            index["partners"][number] = stream.append(pa.record_batch(columns, names))
            forget()
        for span, range_file in _spans(ranges):
            if crc32(keys[:, span].tobytes()) != range_file.part.keys_crc:
                raise damaged_part(file)
            forget()
    notes["mismatched_completions_used_twice"] += repeats.used_twice
    notes["mismatched_completions_met_again_by_the_same_row"] += repeats.met_again


def _spans(ranges: Sequence[_RangeFile]) -> Iterator[tuple[slice, _RangeFile]]:
    """Each range, and which completions of the ring are in it."""
    first = 0
    for file in ranges:
        stop = first + file.part.completions
        yield slice(first, stop), file
        first = stop


def _read(path: Path, start: int, size: int, checksum: int) -> bytes:
    content = read_part(path, start, size)
    if len(content) != size or crc32(content) != checksum:
        raise damaged_part(path)
    return content


def _are_mismatched(partners: NDArray[np.int64], prompts: NDArray[np.uint64], span: slice) -> bool:
    """Whether the partners of a span of completions are completions of other prompts."""
    are_there = bool(((partners >= 0) & (partners < len(prompts))).all())
    return are_there and bool((prompts[partners] != prompts[span]).all())
