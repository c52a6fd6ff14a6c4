"""Puts every row of the input on the ring: encode, sort out of core, choose the KL partners."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...schemas.row_keys import EncodedChunk, KeyedRows
from ...schemas.rows import Rejected
from ..storage import fs
from .kl_partners import choose_partners
from .long_form import merge_same_prompts
from .number_files import NumberFile, Summed
from .spool import KEY, Spool, SpoolWriter

TOKENS_PER_RUN = 8 * 1024 * 1024
TOKENS_PER_MERGE = 8 * 1024 * 1024
# What the other columns of a branch weigh, in tokens: short rows are mostly columns.
TOKENS_PER_BRANCH = 40
# A file of nothing but bad rows must not fill the disk with their descriptions.
MOST_REJECTED_KEPT = 100_000
PARTNER = "<i8"


@dataclass
class Intake:
    """Counts of the input, and the rejected rows up to a limit."""

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

    folder: Path
    carried: tuple[str, ...]
    num_pairs: int

    def __len__(self) -> int:
        return len(self.spool)

    @property
    def spool(self) -> Spool:
        """The rows."""
        return Spool(self.folder / "ring", self.carried)

    @property
    def prompts_file(self) -> Path:
        """The place on the ring of every completion's prompt."""
        return self.folder / "completion_prompts.bin"

    @property
    def partner_files(self) -> list[Path]:
        """For each k, the partner of every completion."""
        return [self.folder / f"partners-{k}.bin" for k in range(self.num_pairs)]

    @property
    def is_whole(self) -> bool:
        """Whether it is complete: sealed, with all of its files in place."""
        numbers = [self._prompts, *self._partners] if self.num_pairs else []
        return (
            self._seal.exists()
            and self.spool.is_there
            and all(column.is_there for column in numbers)
        )

    @property
    def _seal(self) -> Path:
        return self.folder / "whole"

    def seal(self) -> None:
        """The file that marks the ring as complete."""
        fs.fsync_folder(self.folder)
        fs.write_new(self._seal, b"")
        fs.fsync_folder(self.folder)

    def partners(self, first: int, last: int) -> NDArray[np.int64]:
        """Partners of completions `first` to `last`: shape (num_pairs, last - first)."""
        rows = [column.read(first, last) for column in self._partners]
        return np.stack(rows) if rows else np.empty((0, last - first), dtype=np.int64)

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The places of the prompts that the completions at `indices` belong to."""
        return self._prompts.at(indices)

    @property
    def _prompts(self) -> Summed:
        return Summed(self.prompts_file, KEY)

    @property
    def _partners(self) -> list[Summed]:
        return [Summed(path, PARTNER) for path in self.partner_files]


def collect_runs(
    folder: Path, chunks: Iterable[EncodedChunk], *, carried: tuple[str, ...], intake: Intake
) -> list[Spool]:
    """Writes the encoded rows as runs, each sorted and small enough to be sorted in memory."""
    runs: list[Spool] = []
    for batch in _batched(chunks, intake):
        place = folder / f"run-{len(runs):05d}"
        with SpoolWriter(place, carried=carried) as writer:
            writer.append(_in_ring_order(batch))
        runs.append(Spool(place, carried))
    return runs


def merge_runs(
    folder: Path,
    runs: list[Spool],
    *,
    long_form: bool,
    prompt_side: str,
    num_pairs: int,
    intake: Intake,
) -> Ring:
    """Merges sorted runs into the ring, then pairs every completion."""
    carried = runs[0].carried if runs else ()
    ring = Ring(folder, carried, num_pairs)
    with SpoolWriter(ring.spool.folder, carried=carried) as writer:
        for parts in _key_ranges(runs):
            rows = _in_ring_order(parts)
            if long_form:
                rows = merge_same_prompts(rows, intake.notes, prompt_side=prompt_side)
            writer.append(_number_copies(rows, intake.notes))
            del rows  # before the next range is read
    for run in runs:
        shutil.rmtree(run.folder)
    if num_pairs:
        _write_prompts(ring)
        _write_partners(ring, intake.notes)
    ring.seal()
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


def _in_ring_order(parts: list[KeyedRows]) -> KeyedRows:
    """All rows as one sorted block; `parts` is emptied, so that no row is held three times."""
    joined = KeyedRows.concat(parts)
    parts.clear()
    return joined.in_ring_order()


def _key_ranges(runs: list[Spool]) -> Iterator[list[KeyedRows]]:
    """The rows of all runs, range by range of their keys."""
    num_ranges = 1 + sum(map(_stored_weight, runs)) // TOKENS_PER_MERGE
    starts = [0] * len(runs)
    for index in range(1, num_ranges + 1):
        last_key = (index * 2**64) // num_ranges - 1
        stops = [run.between(0, last_key)[1] for run in runs]
        spans = zip(runs, starts, stops, strict=True)
        parts = [run.read(start, stop) for run, start, stop in spans if stop > start]
        starts = stops
        if parts:
            yield parts


def _weight(keyed: KeyedRows) -> int:
    rows = keyed.rows
    branches = TOKENS_PER_BRANCH * len(rows.completions)
    return branches + len(rows.completions.values) + len(rows.prompts.values)


def _stored_weight(run: Spool) -> int:
    """The weight of a run on disk, from the sizes of its files."""
    sizes = {"completion_ends": 8, "completion_values": 4, "prompt_values": 4}
    branches, *tokens = (
        (run.folder / f"{name}.bin").stat().st_size // size for name, size in sizes.items()
    )
    return TOKENS_PER_BRANCH * branches + sum(tokens)


def _number_copies(keyed: KeyedRows, notes: Counter[str]) -> KeyedRows:
    """Numbers rows of equal content 0, 1, 2, ... in ring order."""
    row_id = keyed.rows.row_id
    is_first = np.append(True, row_id[1:] != row_id[:-1])
    place = np.arange(len(row_id))
    copy = place - np.maximum.accumulate(np.where(is_first, place, 0))
    notes["rows_that_repeat_another_row"] += int((~is_first).sum())
    keyed.rows.copy[:] = copy
    return keyed


def _write_prompts(ring: Ring) -> None:
    spool = ring.spool
    with NumberFile(ring.prompts_file, KEY, length=spool.num_completions) as keys:
        for start, stop, branches in spool.stretches():
            prompts = np.repeat(spool.column("places", start, stop), np.diff(branches))
            keys[int(branches[0]) : int(branches[-1])] = prompts


def _write_partners(ring: Ring, notes: Counter[str]) -> None:
    with ExitStack() as stack:
        total = ring.spool.num_completions
        prompts, texts = (
            stack.enter_context(NumberFile(path, KEY))
            for path in (ring.prompts_file, ring.spool.folder / "completion_keys.bin")
        )
        partners = [
            stack.enter_context(NumberFile(path, PARTNER, length=total))
            for path in ring.partner_files
        ]

        def forget() -> None:
            for file in (prompts, texts, *partners):
                file.forget()

        repeats = choose_partners(prompts, texts, partners, forget=forget)
    notes["mismatched_completions_used_twice"] += repeats.used_twice
    notes["mismatched_completions_met_again_by_the_same_row"] += repeats.met_again
