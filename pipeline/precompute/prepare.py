"""Encodes slices of the data into files divided by key range, then makes the plan.

Any processes may encode slices, in any order and more than once: a slice becomes one file, with the
same bytes from any process, and one record.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import FORMAT_VERSION, InputEntry, Plan
from ...schemas.config import Config
from ...schemas.errors import BadDataError, CorruptionError, StorageError, damaged
from ...stages.data.cells import template_unused
from ...stages.data.encode import Encoder, EncodingJob, InputCounts
from ...stages.data.files import Digested, InputFile, require_unchanged, slices_of
from ...stages.data.readers import FilePart
from ...stages.data.tokenizer import tokenizer_fingerprint
from ...stages.engine.launchers import ranks_here
from ...stages.pairing.partition import (
    REMEDY,
    EncodedSlice,
    ShardReader,
    SliceFile,
    majority_candidate,
    number_of_ranges,
    number_of_shards,
    write_slice,
)
from ...stages.storage.cache_work import CacheWork, printable
from ...stages.storage.disk import fs
from ...stages.storage.locations import is_remote, origin_of
from ...stages.storage.records import Records
from ...stages.storage.tables import distribution_of
from ...stages.tracking.progress import Progress
from ..jobs.rejected_rows import RejectedRows, first_rejected
from ..parts import WHOLE, Part
from ..ray_actors import run_on_ray
from ..workers import run_in_processes, usable_cores
from .opening import CacheJob, candidates

RECORDS = Records(EncodedSlice, remedy=REMEDY)

# With fewer bytes, starting processes costs more than it saves.
SMALL_INPUT_BYTES = 8 * 1024 * 1024
OF_TEXT = "rows_of_plain_text"
KINDS = {"rows_of_conversations", OF_TEXT}


@dataclass(frozen=True)
class Slices:
    """The slices of the data and their encoded files, equal in every process."""

    cache: CacheWork
    encoding: EncodingJob
    inputs: tuple[InputFile, ...]
    digested: tuple[Digested, ...]
    slices: list[list[FilePart]]  # each one part of a file, or several small files
    ranges: int

    @staticmethod
    def of(job: CacheJob) -> Slices:
        """The slices of the data of a job."""
        options, slices = job.config, slices_of(job.inputs, job.shape.columns)
        total = sum(file_part.bytes for file_parts in slices for file_part in file_parts)
        known = tokenizer_fingerprint(job.tokenizer)
        return Slices(
            job.cache,
            EncodingJob(options.model.path, options.tokens, job.shape, job.files, known),
            job.inputs,
            job.digested,
            slices,
            number_of_ranges(total, options.cache.shards),
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The approximate bytes of each slice."""
        return tuple(sum(file_part.bytes for file_part in file_parts) for file_parts in self.slices)

    def file(self, number: int) -> Path:
        """The encoded file of a slice; its record is beside it."""
        return self.cache.encoded / f"{number:08d}.arrow"

    def find(self, number: int) -> EncodedSlice | None:
        """The record of a slice with a complete file; None if there is none."""
        path = self.file(number)
        try:
            record = RECORDS.read(path.with_suffix(".json"))
            return record if path.stat().st_size == record.bytes else None
        except (StorageError, CorruptionError, FileNotFoundError):
            return None  # the slice is encoded again

    def encoded(self) -> Encoded:
        """All slices, once they are encoded."""
        found = [*map(self.find, range(len(self.slices)))]
        if None in found:
            raise damaged(self.file(found.index(None)), "it is missing or short", REMEDY)
        return Encoded(self, [record for record in found if record])


class Encode:
    """Encodes slices in any process; each process opens the tokenizer once."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._encoder: Encoder | None = None

    def __call__(self, number: int) -> int:
        """Encodes a slice unless it is done, file before record; returns the slice's bytes."""
        slices = self._slices
        if slices.find(number):
            return slices.sizes[number]
        encoder = self._encoder = self._encoder or slices.encoding.open()
        path, file_parts, counts = slices.file(number), slices.slices[number], InputCounts()
        with fs.new_file(path, replaces=True) as sink:
            rows = (
                keyed
                for file_part in file_parts
                for keyed in slices.encoding.rows(encoder, slices.inputs, file_part, counts)
            )
            facts = write_slice(sink, rows, slices.ranges)
            for file_part in file_parts:
                require_unchanged(
                    [slices.inputs[file_part.file]], [slices.digested[file_part.file]]
                )
        record = EncodedSlice(
            **facts,
            bytes=path.stat().st_size,
            rows_in=tuple(counts.rows_per_file[file_part.file] for file_part in file_parts),
            notes=dict(counts.notes),
            reasons=dict(counts.reasons),
            rejected=tuple(replace(one, detail=printable(one.detail)) for one in counts.rejected),
        )
        RECORDS.replace(path.with_suffix(".json"), record)
        return slices.sizes[number]


@dataclass(frozen=True)
class Encoded:
    """The encoded slices of all data, by their records."""

    slices: Slices
    records: list[EncodedSlice]

    @cached_property
    def counts(self) -> InputCounts:
        """The counts of all rows, and the first of the rejected ones."""
        counts = InputCounts()
        found = zip(self.slices.slices, self._first_rows, self.records, strict=True)
        for file_parts, first_row, one in found:
            for file_part, rows in zip(file_parts, one.rows_in, strict=True):
                counts.rows_per_file[file_part.file] += rows
            counts.notes.update(one.notes)
            counts.reasons.update(one.reasons)
            counts.keep(replace(bad, row=bad.row + first_row) for bad in one.rejected)
        return counts

    def shards(self, asked: int) -> tuple[int, ...]:
        """The rows of each shard; `asked` is the number of shards, 0: chosen by the data."""
        rows: NDArray[np.int64] = np.zeros(self.slices.ranges, np.int64)
        for one in self.records:
            rows += np.sum(one.counts, axis=0, dtype=np.int64) if one.counts else 0
        shards = number_of_shards(self.slices.ranges, int(rows.sum()), asked)
        return tuple(rows.reshape(shards, -1).sum(axis=1).tolist())

    def rows(self, *, shards: int, prompt_side: str | None = None) -> ShardReader:
        """A reader of shards' rows; with `prompt_side`, rows of one prompt are joined."""
        ranges = self.slices.ranges
        files = [
            SliceFile(
                self.slices.file(number), np.array(one.counts, np.int32).reshape(-1, ranges), first
            )
            for number, (one, first) in enumerate(zip(self.records, self._first_rows, strict=True))
        ]
        return ShardReader(files, shards, prompt_side)

    @cached_property
    def _first_rows(self) -> list[int]:
        """The number of rows before each slice in its data file."""
        first_rows: list[int] = []
        first, file = 0, 0
        for (file_part, *_), one in zip(self.slices.slices, self.records, strict=True):
            first = first if file_part.file == file else 0
            first_rows.append(first)
            first, file = first + one.rows_in[0], file_part.file
        return first_rows


def encode(slices: Slices, options: Config, part: Part | None, *, progress: Progress) -> Encoded:
    """Encodes all missing slices: those of this part first, then those of others."""
    order = (part or WHOLE).first_of(slices.sizes)
    todo = [number for number in order if not slices.find(number)]
    progress.begin("reading and tokenizing", total=sum(slices.sizes), unit="bytes")
    progress.advance(sum(slices.sizes) - sum(slices.sizes[number] for number in todo))

    function, scoring = Encode(slices), options.scoring
    is_small = sum(file.bytes for file in slices.inputs) < SMALL_INPUT_BYTES
    cores = max(1, usable_cores() // ranks_here(os.environ))
    processes = options.data.workers or (0 if is_small else cores)
    made: Generator[tuple[int, int]] = ((number, function(number)) for number in todo)
    if scoring.executor == "ray" and scoring.ray_address and not is_small:
        made = run_on_ray(function, todo, "slice", scoring.ray_address, None, 0.0)
    elif processes and len(todo) > 1:
        made = run_in_processes(function, todo, processes)
    try:
        with closing(made):
            for _, done in made:
                progress.advance(done)
    except BadDataError:
        require_unchanged(slices.inputs, slices.digested)  # a clearer error
        raise
    # Checked at the end, because Parquet and memory-mapped files are not read in order.
    require_unchanged(slices.inputs, slices.digested)
    progress.end()
    return slices.encoded()


def make_plan(job: CacheJob, encoded: Encoded, progress: Progress) -> Plan:
    """Writes the plan; refuses data that cannot be scored, before a model is loaded."""
    counts, options, pairs = encoded.counts, job.config, job.config.cache.kl_pairs
    texts = counts.notes[OF_TEXT]
    if texts and options.data.wrap == "auto" and job.tokenizer.chat:
        progress.log(f"note: {template_unused(texts, 'rows')}")

    # Too many rejected rows, no KL completions, or no space for the shards.
    rejected = RejectedRows(
        counts=counts.reasons,
        rows_in=counts.rows_in,
        allowed=options.data.max_bad_frac,
    )
    if rejected.exceed_limit:
        is_named = job.shape.declared.prompt or not counts.reasons["empty_prompt"]
        named = " If the prompts are in another column, pass --map prompt=NAME."
        names = {file: path.name for file, path in job.paths.items()}
        job.cache.write_rejected(counts.rejected, names)
        rejected.require_few(
            first_rejected(counts.rejected, job.paths.__getitem__),
            listed=job.cache.shown(job.cache.rejected) if counts.rejected else "",
            hint="" if is_named else named,
        )
    if pairs:
        _require_kl_completions(encoded)
    # The size of raw ids and sums; compression and the other columns about cancel out.
    tokens = sum(one.prompt_tokens + (1 + pairs) * one.completion_tokens for one in encoded.records)
    needed = int(1.3 * 4 * tokens * (2 if options.cache.token_logps else 1))
    free = fs.free_bytes(job.cache.root)
    if not job.cache.url and free < needed:
        raise StorageError(
            f"{job.cache}: the shards may need {needed:,} bytes, but {free:,} are free. "
            "Free some space, or choose another --output."
        )

    drawn = tuple(distribution_of(file.path) for file in job.inputs)
    plan = Plan(
        format_version=FORMAT_VERSION,
        plan_key=job.cache.plan_key,
        fingerprint=job.fingerprint,
        reference_key=job.reference_key,
        model=absolute_origin(options.model.path),
        adapter=absolute_origin(options.model.adapter),
        inputs=tuple(
            InputEntry(file.path.name, read.bytes, read.sha256, counts.rows_per_file[index])
            for index, (file, read) in enumerate(zip(job.inputs, job.digested, strict=True))
        ),
        rows_in=counts.rows_in,
        shards=encoded.shards(options.cache.shards),
        rejected=tuple(counts.rejected),
        reasons=dict(sorted(counts.reasons.items())),
        notes=worth_noting(counts.notes),
        reuse=candidates(options.cache) if options.cache.scored else (),
        threads=usable_cores(),
        sampling=drawn if any(drawn) else (),
    )
    return job.cache.put_plan(plan)


def worth_noting(notes: Mapping[str, int]) -> dict[str, int]:
    """The counts by name; conversations and plain text are counted only if the data have both."""
    found = {name: count for name, count in sorted(notes.items()) if count}
    is_mixed = found.keys() >= KINDS
    return {name: count for name, count in found.items() if is_mixed or name not in KINDS}


def absolute_origin(path: str) -> str:
    """Where a model comes from: its address in a bucket, or its absolute path."""
    origin = origin_of(path)
    return origin if not path or is_remote(origin) else str(Path(origin).resolve())


def _require_kl_completions(encoded: Encoded) -> None:
    """Refuses data with most completions under one prompt, or with a single text."""
    total = sum(one.completions for one in encoded.records)
    if prompt := majority_candidate(encoded.records):
        rows = encoded.rows(shards=encoded.slices.ranges)
        if 2 * (largest := rows.completions_of(int(prompt, 16))) > total:
            raise BadDataError(
                f"One prompt has {largest} of all {total} completions, so the other prompts have "
                "too few KL completions for it. Add rows with other prompts, or pass --kl-pairs 0."
            )
    lowest, highest = zip(*(one.texts for one in encoded.records), strict=True)
    if min(lowest) == max(highest):
        raise BadDataError(
            "All completions are the same text, so a KL completion would equal the real one. Add "
            "rows with other completions, or pass --kl-pairs 0."
        )
