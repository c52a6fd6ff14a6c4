"""The ring with the partners of its completions, and the units it is cut into for scoring."""

from __future__ import annotations

import hashlib
import io
import mmap
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.rows import Ragged, Rejected, Role, RowBlock
from ..storage import fs
from ..storage.shards import arrow_of, numpy_of
from .kl_partners import CutRule, FittedPartners, choose_partners, fit_partners
from .sorted_rows import (
    SortedRows,
    damaged,
    first_of,
    new_stream,
    parts_of,
    read_batch,
    read_content,
)

BATCHES_HELD = 8  # of the rows that are looked up


@dataclass(frozen=True)
class Ring:
    """All rows in ring order, on disk, with their KL partners."""

    folder: Path
    num_pairs: int

    @property
    def rows_file(self) -> Path:
        """The rows."""
        return self.folder / "rows.arrows"

    @property
    def partners_file(self) -> Path:
        """The partners of every completion for each k, in the batches of the rows."""
        return self.folder / "partners.arrows"

    @property
    def index_file(self) -> Path:
        """The place of each batch; written last, so if it exists, the ring is complete."""
        return self.folder / "index.npy"

    @property
    def is_whole(self) -> bool:
        """Whether it is complete, with all of its files in place."""
        partners = [self.partners_file] if self.num_pairs else []
        return all(path.exists() for path in (self.index_file, self.rows_file, *partners))

    def is_equal(self, other: Ring) -> bool:
        """Whether another one is whole and has the same index, which holds all checksums."""
        mine = read_content(self.index_file)
        return other.is_whole and read_content(other.index_file) == mine

    @cached_property
    def rows(self) -> SortedRows:
        """The rows of a complete ring."""
        content = read_content(self.index_file)
        index, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if hashlib.sha256(index).digest() != digest:
            raise damaged(self.index_file)
        return SortedRows(self.rows_file, np.load(io.BytesIO(index)), BATCHES_HELD)

    def partners(self, first: int, last: int) -> NDArray[np.int64]:
        """Partners of completions `first` to `last`: shape (num_pairs, last - first)."""
        found = np.empty((self.num_pairs, last - first), dtype=np.int64)
        if self.num_pairs:
            place = 0
            for number, part in parts_of(self.rows.index["completion"], first, last):
                batch = read_batch(self.partners_file, self.rows.index["partners"], number)
                end = place + part.stop - part.start
                found[:, place:end] = [numpy_of(column)[part] for column in batch.columns]
                place = end
        return found

    def complete(self, rows: SortedRows, notes: Counter[str]) -> None:
        """Pairs every completion of the rows, and marks the ring as complete by its index."""
        if self.num_pairs:
            self._write_partners(rows, notes)
        content = io.BytesIO()
        np.save(content, rows.index)
        digest = hashlib.sha256(content.getvalue()).digest()
        fs.fsync_folder(self.folder)
        draft = self.index_file.with_suffix(".tmp")
        fs.write_new(draft, content.getvalue() + digest)
        fs.rename(draft, self.index_file)
        fs.fsync_folder(self.folder)

    def _write_partners(self, rows: SortedRows, notes: Counter[str]) -> None:
        """Chooses the partners, over keys in a file, and enters their batches in the index."""
        file, total = self.folder / "keys.bin", rows.num_completions
        mapped = fs.new_map(file, 8 * (2 + self.num_pairs) * total)
        numbers = np.frombuffer(mapped, dtype=np.int64).reshape(2 + self.num_pairs, total)
        keys, partners = numbers[:2].view(np.uint64), numbers[2:]
        forget = partial(mapped.madvise, mmap.MADV_DONTNEED)
        first = checksum = found = 0
        for keyed in rows.batches():
            places = np.repeat(keyed.places, np.diff(keyed.rows.branch_offsets))
            span = slice(first, first + len(places))
            keys[:, span] = places, keyed.completion_keys
            checksum, first = crc32(keys[:, span].tobytes(), checksum), span.stop
            forget()
        repeats = choose_partners(keys[0], keys[1], list(partners), forget=forget)
        names = [f"partner_{k + 1}" for k in range(self.num_pairs)]
        with new_stream(self.partners_file) as append:
            for number, end in enumerate(rows.index["completion"].tolist()):
                span = slice(first_of(rows.index["completion"], number), end)
                chosen = [each[span].copy() for each in partners]
                if any(not _are_mismatched(each, keys[0], span) for each in chosen):
                    raise damaged(file)
                columns = [arrow_of(each, pa.int64()) for each in chosen]
                rows.index["partners"][number] = append(pa.record_batch(columns, names))
                found = crc32(keys[:, span].tobytes(), found)
                forget()
        if found != checksum:
            raise damaged(file)
        fs.unlink(file)
        notes["mismatched_completions_used_twice"] += repeats.used_twice
        notes["mismatched_completions_met_again_by_the_same_row"] += repeats.met_again


def _are_mismatched(partners: NDArray[np.int64], prompts: NDArray[np.uint64], span: slice) -> bool:
    """Whether the partners of a span of completions are completions of other prompts."""
    are_there = bool(((partners >= 0) & (partners < len(prompts))).all())
    return are_there and bool((prompts[partners] != prompts[span]).all())


_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Unit:
    """Rows of one key range of the ring, ready to be scored."""

    rows: RowBlock  # own branches first, then the mismatched ones, k by k
    first_key: str
    last_key: str
    rejected: tuple[Rejected, ...]
    replaced: int  # partners that cutting had made alike, and others stand in for


def unit_offsets(
    rows: SortedRows, *, num_pairs: int, rows_per_unit: int, tokens_per_unit: int
) -> tuple[int, ...]:
    """Row numbers where units begin, and the end; set by the rows alone."""
    offsets, held, first = [0], 0, 0
    for keyed in rows.batches():
        block, last = keyed.rows, first + len(keyed)
        completions = block.completions.offsets[block.branch_offsets]
        # Tokens up to each row; how long mismatched completions are is estimated by its own.
        ends = block.prompts.offsets + (1 + num_pairs) * completions
        place = first
        while place < last:
            start = offsets[-1]
            before = int(ends[place - first])
            fit = np.searchsorted(ends[1:], before + tokens_per_unit - held, side="right")
            stop = min(first + int(fit), start + rows_per_unit, last)
            if place == start:
                stop = max(stop, start + 1)  # however long it is
            held += int(ends[stop - first]) - before
            if stop < last:
                offsets.append(stop)
                held = 0
            place = stop
        first = last
    return tuple(offsets if offsets[-1] == first else [*offsets, first])


def build_unit(ring: Ring, start: int, stop: int, rule: CutRule) -> Unit:
    """Reads rows `start` to `stop` and gives each completion its mismatched partners."""
    keyed = ring.rows.read(start, stop)
    first = ring.rows.first_completion(start)
    chosen = ring.partners(first, first + len(keyed.rows.completions)).reshape(-1)
    partners = fit_partners(ring.rows, keyed, chosen, rule)
    rows = _with_mismatched(keyed.rows, partners, ring.num_pairs)
    if partners.missing:
        rows = rows.take(np.setdiff1d(np.arange(len(rows)), list(partners.missing)))
    return Unit(
        rows=rows,
        first_key=f"{int(keyed.places[0]):016x}",
        last_key=f"{int(keyed.places[-1]):016x}",
        rejected=tuple(
            Rejected(int(keyed.rows.file[row]), int(keyed.rows.row[row]), "no_mismatch", why)
            for row, why in sorted(partners.missing.items())
        ),
        replaced=int((partners.numbers != chosen).sum()),
    )


def _with_mismatched(own: RowBlock, mismatched: FittedPartners, num_pairs: int) -> RowBlock:
    """Appends to each row its mismatched branches: all of k = 1, then all of k = 2, ..."""
    count = len(own.completions)
    branch_rows = np.tile(own.row_of_branch, 1 + num_pairs)
    level = np.repeat(np.arange(1 + num_pairs), count)
    order = np.lexsort((np.arange(len(branch_rows)), level, branch_rows))
    extra = len(mismatched.ids)
    roles = np.append(own.roles, np.full(extra, Role.MISMATCHED, dtype=np.int8))
    scores = np.append(own.scores, np.full(extra, np.nan))
    return replace(
        own,
        branch_offsets=own.branch_offsets * (1 + num_pairs),
        completions=Ragged.concat([own.completions, mismatched.ids]).take(order),
        roles=roles[order],
        scores=scores[order],
        cut=np.append(own.cut, mismatched.cut)[order],
    )
