"""Puts every row of the input on the ring: encode, sort out of core, choose the KL partners."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .keyed import KeyedRows
from .long_form import merge_same_prompts
from .partners import choose_partners
from .spool import Spool, SpoolWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from ...schemas.rows import Rejected
    from .workers import EncodedChunk

TOKENS_PER_RUN = 8 * 1024 * 1024
TOKENS_PER_MERGE = 8 * 1024 * 1024
# What the other columns of a branch weigh, in tokens: short rows are mostly columns.
TOKENS_PER_BRANCH = 32
# A file of nothing but bad rows must not fill the disk with their descriptions.
MOST_REJECTED_KEPT = 100_000


@dataclass
class Intake:
    """What came in: counts of everything, and the rejected rows themselves up to a limit."""

    rows_per_file: Counter[int] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def rows_in(self) -> int:
        """Rows read, good and bad."""
        return self.rows_per_file.total()

    def count(self, chunk: EncodedChunk) -> None:
        """Adds one chunk."""
        self.rows_per_file[chunk.file] += len(chunk.keyed) + len(chunk.rejected)
        self.notes.update(chunk.notes)
        self.reasons.update(rejected.reason for rejected in chunk.rejected)
        room = MOST_REJECTED_KEPT - len(self.rejected)
        self.rejected.extend(chunk.rejected[:room])


@dataclass(frozen=True)
class Ring:
    """All rows in ring order, on disk, with their KL partners."""

    spool: Spool
    partners_file: Path
    num_pairs: int

    def __len__(self) -> int:
        return len(self.spool)

    def partners(self, first: int, last: int) -> NDArray[np.int64]:
        """Partners of completions `first` to `last`: shape (num_pairs, last - first)."""
        total = self.partners_file.stat().st_size // 8 // self.num_pairs if self.num_pairs else 0
        rows = [
            np.fromfile(
                self.partners_file, dtype="<i8", count=last - first, offset=8 * (k * total + first)
            )
            for k in range(self.num_pairs)
        ]
        return np.stack(rows) if rows else np.empty((0, last - first), dtype=np.int64)


def collect_runs(
    folder: Path, chunks: Iterable[EncodedChunk], *, carried: tuple[str, ...], intake: Intake
) -> list[Spool]:
    """Writes the encoded rows as runs, each sorted and small enough to be sorted in memory."""
    runs: list[Spool] = []
    for batch in _batched(chunks, intake):
        place = folder / f"run-{len(runs):05d}"
        with SpoolWriter(place, carried=carried) as writer:
            writer.append(KeyedRows.concat(batch).in_ring_order())
        runs.append(Spool(place, carried))
    return runs


def merge_runs(
    folder: Path, runs: list[Spool], *, long_form: bool, num_pairs: int, intake: Intake
) -> Ring:
    """Merges sorted runs into the ring, then pairs every completion."""
    carried = runs[0].carried if runs else ()
    spool = Spool(folder / "ring", carried)
    with SpoolWriter(spool.folder, carried=carried) as writer:
        for part in _key_ranges(runs):
            rows = merge_same_prompts(part, intake.notes) if long_form else part
            writer.append(_number_copies(rows, intake.notes))
    for run in runs:
        shutil.rmtree(run.folder)
    ring = Ring(spool, folder / "partners.bin", num_pairs)
    _write_partners(ring, intake.notes)
    return ring


def _batched(chunks: Iterable[EncodedChunk], intake: Intake) -> Iterator[list[KeyedRows]]:
    batch: list[KeyedRows] = []
    tokens = 0
    for chunk in chunks:
        intake.count(chunk)
        if not len(chunk.keyed):
            continue
        batch.append(chunk.keyed)
        tokens += _weight(chunk.keyed)
        if tokens >= TOKENS_PER_RUN:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _key_ranges(runs: list[Spool]) -> Iterator[KeyedRows]:
    """The rows of all runs, range by range of their keys, each range in ring order."""
    num_ranges = 1 + sum(map(_stored_weight, runs)) // TOKENS_PER_MERGE
    edges = [(i * 2**64) // num_ranges for i in range(1, num_ranges)]
    keys = np.array(edges, dtype=np.uint64)
    cuts = []
    for run in runs:
        inner = np.searchsorted(run.column("prompt_keys"), keys, side="left").tolist()
        cuts.append([0, *inner, len(run)])
    for index in range(num_ranges):
        spans = [(run, cut[index], cut[index + 1]) for run, cut in zip(runs, cuts, strict=True)]
        parts = [run.read(start, stop) for run, start, stop in spans if stop > start]
        if parts:
            yield KeyedRows.concat(parts).in_ring_order()


def _weight(keyed: KeyedRows) -> int:
    rows = keyed.rows
    branches = TOKENS_PER_BRANCH * len(rows.completions)
    return branches + len(rows.completions.values) + len(rows.prompts.values)


def _stored_weight(run: Spool) -> int:
    """The same of a run on disk, told by the sizes of its files."""
    sizes = {"completion_ends": 8, "completion_values": 4, "prompt_values": 4}
    branches, *tokens = (
        (run.folder / f"{name}.bin").stat().st_size // size for name, size in sizes.items()
    )
    return TOKENS_PER_BRANCH * branches + sum(tokens)


def _number_copies(keyed: KeyedRows, notes: Counter[str]) -> KeyedRows:
    """Tells rows of equal content apart: 0, 1, 2, ... in ring order."""
    row_id = keyed.rows.row_id
    is_first = np.append(True, row_id[1:] != row_id[:-1])
    place = np.arange(len(row_id))
    copy = place - np.maximum.accumulate(np.where(is_first, place, 0))
    notes["rows_that_repeat_another_row"] += int((~is_first).sum())
    keyed.rows.copy[:] = copy
    return keyed


def _write_partners(ring: Ring, notes: Counter[str]) -> None:
    spool = ring.spool
    branch_counts = np.diff(spool.column("branch_ends"), prepend=np.int64(0))
    prompt_keys = np.repeat(spool.column("prompt_keys"), branch_counts)
    partners = choose_partners(
        prompt_keys, spool.column("completion_keys"), num_pairs=ring.num_pairs
    )
    notes["mismatched_completions_used_twice"] += partners.repeated
    notes["mismatched_completions_met_again_by_the_same_row"] += partners.met_again
    partners.indices.astype("<i8").tofile(ring.partners_file)
