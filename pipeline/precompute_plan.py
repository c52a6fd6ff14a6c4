"""Makes the plan from the input files: the job, the ring on disk, the quarantine, the units."""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..schemas.cache import FORMAT_VERSION, FileEntry, InputEntry, Plan, file_identity
from ..schemas.config import Config
from ..schemas.errors import (
    BadDataError,
    CorruptionError,
    StorageError,
    UsageError,
    os_errors_as_storage_errors,
)
from ..schemas.json_codec import digest
from ..schemas.row_keys import Intake
from ..schemas.rows import Reference
from ..stages.data.data_schema import Shape, common_shape
from ..stages.data.decode_rows import first_is_conversation
from ..stages.data.encode_workers import EncodingJob, default_workers, encode_chunks, usable_cores
from ..stages.data.input_files import (
    Chunk,
    Digested,
    InputFile,
    digested,
    iter_chunks,
    open_inputs,
    require_unchanged,
)
from ..stages.data.tokenizer import TextTokenizer, load_tokenizer, tokenizer_fingerprint
from ..stages.pairing.long_form import merge_same_prompts
from ..stages.pairing.sorted_rows import SortedRows, collect_runs, merge_runs
from ..stages.pairing.units import Ring, unit_offsets
from ..stages.storage import fs, places
from ..stages.storage.cache_folder import CacheFolder, WorkFolder
from ..stages.storage.commits import write_quarantine
from ..stages.storage.failpoints import reach
from ..stages.storage.local_copies import origin_of
from ..stages.storage.manifest_file import load_manifest, write_plan
from ..stages.storage.objects import Location, location
from .cache_compatibility import candidates, fingerprint, require_growth

if TYPE_CHECKING:
    from ..stages.tracking.progress import Progress


@dataclass(frozen=True)
class Job:
    """Everything that is known before the first row is encoded."""

    config: Config
    reference: Reference
    folder: CacheFolder
    inputs: tuple[InputFile, ...]  # in the order of their digests, however they were named
    digested: tuple[Digested, ...]  # the inputs, before anything else was read from them
    shape: Shape
    tokenizer: TextTokenizer
    fingerprint: dict[str, str]
    plan_key: str
    reference_key: str

    @property
    def files(self) -> tuple[int, ...]:
        """The identity of each input."""
        return tuple(file_identity(file.sha256) for file in self.digested)

    @property
    def paths(self) -> dict[int, Path]:
        """The path of each data file by its identity; of files with equal bytes the last."""
        return {identity: file.path for identity, file in zip(self.files, self.inputs, strict=True)}

    @property
    def work(self) -> WorkFolder:
        """The folder of unfinished work."""
        return self.folder.work(self.plan_key)

    @property
    def is_published(self) -> bool:
        """Whether the folder already holds the finished cache of this job."""
        version = places.version_of(self.folder.manifest)
        return bool(version) and _published_plan(self.folder, version) == self.plan_key


def require_model(config: Config) -> None:
    """Refuses a config without a reference model, before anything heavy is loaded."""
    if not config.model.path:
        raise UsageError(
            "No reference model. Pass --model DIR, set ALIGN_MODEL, or run `align init` and set "
            "model.path in align.yaml."
        )


def open_job(config: Config, reference: Reference) -> Job:
    """Opens the data, the tokenizer and the reference; writes nothing."""
    inputs, before = _in_order(open_inputs(config.data.files))
    shape = common_shape(inputs, config.data.map, config.data.carry)
    tokenizer = load_tokenizer(config.model.path, config.tokens)
    if first_is_conversation(inputs, shape):
        tokenizer.require_template(config.model.path)
    identity = dict(reference.identity())
    fields = fingerprint(
        config,
        files=digest([file.sha256 for file in before]),
        shape=digest({"kind": shape.kind, "source": shape.source, "carried": shape.carried}),
        tokenizer=tokenizer_fingerprint(tokenizer),
        model=identity,
    )
    return Job(
        config=config,
        reference=reference,
        folder=CacheFolder(location(config.cache.output)),
        inputs=inputs,
        digested=before,
        shape=shape,
        tokenizer=tokenizer,
        fingerprint=fields,
        plan_key=digest(fields),
        reference_key=digest(identity),
    )


@lru_cache(maxsize=1)
def _published_plan(folder: CacheFolder, version: str) -> str:
    """The plan key in a manifest, which is read again only when the file is replaced."""
    return load_manifest(folder).plan_key


def _in_order(
    inputs: tuple[InputFile, ...],
) -> tuple[tuple[InputFile, ...], tuple[Digested, ...]]:
    """The files by digest, then by name: the order they were given in has no effect."""
    found = [(digested(file), file) for file in inputs]
    found.sort(key=lambda each: (each[0].sha256, each[1].path.name))
    return tuple(file for _, file in found), tuple(before for before, _ in found)


KINDS = ("rows_of_conversations", "rows_of_plain_text")
SHOWN = 3  # rows that cannot be used, and files that list them


def make_plan(job: Job, run_id: str, progress: Progress) -> Plan:
    """Encodes all rows, puts them on the ring, and writes the plan of what to score."""
    job.work.prepare()
    intake = Intake()
    with _drafted_ring(job) as draft:
        runs = _encode(job, draft.folder, intake, progress)
        quarantine = _quarantine(job, run_id, intake)
        _require_usable(job, intake, quarantine)
        _merge(job, draft, runs, intake)
        if job.folder.manifest.exists():
            long_form = job.shape.kind == "scored_long"
            require_growth(job.folder, load_manifest(job.folder), draft.rows, long_form=long_form)
        _require_space(job, draft)
        plan = _plan(job, draft, intake, quarantine)
        _install(draft, ring_of(job))
    return write_plan(job.work, plan)


@contextmanager
def _drafted_ring(job: Job) -> Iterator[Ring]:
    """A ring to make, which no other process sees; drafts of dead processes go.

    They are told by their locks, so only drafts of this machine are looked at.
    """
    folder = job.work.make_tmp(f"rings-{socket.gethostname()}") / "ring"
    with fs.draft_folder(folder) as draft:
        yield Ring(draft, job.config.cache.kl_pairs)


def _install(draft: Ring, ring: Ring) -> None:
    """Gives a ring its place, unless another process was first with the same one."""
    reach("ring.before_rename")
    while not fs.rename_if_absent(draft.folder, ring.folder):
        if draft.is_equal(ring):
            break
        # Damaged, or of an older version: one rename, so that no process reads half of each.
        fs.rename(ring.folder, draft.folder.with_name(f"ring-{secrets.token_hex(8)}"))
    fs.fsync_folder(ring.folder.parent)
    reach("ring.after_rename")


def _encode(job: Job, spool: Path, intake: Intake, progress: Progress) -> list[SortedRows]:
    """Encodes all usable rows into sorted runs in a folder."""
    config = job.config
    total_bytes = sum(file.bytes for file in job.inputs)
    encoding = EncodingJob(
        config.model.path,
        config.tokens,
        job.shape,
        config.cache.seed,
        job.files,
        tokenizer_fingerprint(job.tokenizer),
    )
    workers = config.data.workers or default_workers(total_bytes)
    progress.begin("reading and tokenizing", total=None, unit="rows")
    chunks = _shown(iter_chunks(job.inputs, job.shape.columns), progress)
    encoded = encode_chunks(chunks, encoding, num_workers=workers)
    with os_errors_as_storage_errors("write", spool):
        try:
            runs = collect_runs(spool, encoded, intake)
        except BadDataError:
            require_unchanged(job.inputs, job.digested)  # the better reason
            raise
    # Only now: Parquet and mapped files are read here and there, some of it after the last chunk.
    require_unchanged(job.inputs, job.digested)
    progress.end()
    return runs


def _merge(job: Job, ring: Ring, runs: list[SortedRows], intake: Intake) -> None:
    """Merges the runs into the ring, then pairs every completion."""
    side = job.config.tokens.prompt_side
    join = partial(merge_same_prompts, notes=intake.notes, prompt_side=side)
    is_long = job.shape.kind == "scored_long"
    with os_errors_as_storage_errors("write", ring.folder):
        rows = merge_runs(ring.rows_file, runs, intake.notes, join=join if is_long else None)
        ring.complete(rows, intake.notes)


def remake_ring(job: Job, plan: Plan, progress: Progress) -> None:
    """Makes the ring of a plan again, because it is missing here or of an older version."""
    job.work.prepare()
    intake = Intake()
    with _drafted_ring(job) as draft:
        _merge(job, draft, _encode(job, draft.folder, intake, progress), intake)
        if _offsets(job, draft) != plan.unit_offsets:
            raise CorruptionError(
                f"{job.work.root}: its rows, prepared again, differ from its plan. Delete it and "
                "run again; all rows that no other cache holds are then scored again."
            )
        _install(draft, ring_of(job))


def ring_of(job: Job) -> Ring:
    """The ring of the plan in the work folder, which may be incomplete."""
    return Ring(job.work.spool, job.config.cache.kl_pairs)


def _shown(chunks: Iterator[Chunk], progress: Progress) -> Iterator[Chunk]:
    for chunk in chunks:
        yield chunk
        progress.advance(len(chunk))


def _quarantine(job: Job, run_id: str, intake: Intake) -> tuple[FileEntry, ...]:
    if not intake.rejected:
        return ()
    names = {file: path.name for file, path in job.paths.items()}
    return (write_quarantine(job.work, run_id, 0, intake.rejected, names),)


def _require_usable(job: Job, intake: Intake, quarantine: tuple[FileEntry, ...]) -> None:
    rejected = RejectedRows(
        counts=intake.reasons,
        rows_in=intake.rows_in,
        rows_left=intake.rows_in - intake.reasons.total(),
        allowed=job.config.data.max_bad_frac,
        files=quarantine,
    )
    if rejected.exceed_limit:
        places = "\n  ".join(
            f"{job.paths[row.file]} row {row.row}: {row.reason}: {row.detail}"
            for row in intake.rejected[:SHOWN]
        )
        raise BadDataError(
            f"{rejected}. The first of them:\n  {places}\nAll are listed in "
            f"{rejected.listed(job.folder.root)}. Fix them, or allow more with --max-bad-frac."
            f"{_prompt_hint(job, intake)}"
        )


def _prompt_hint(job: Job, intake: Intake) -> str:
    if job.shape.has_prompt or not intake.reasons["empty_prompt"]:
        return ""
    return " If the prompts are in a column of another name, pass --map prompt=NAME."


def _require_space(job: Job, ring: Ring) -> None:
    """Refuses early when the shards cannot fit, by the raw size of their ids and sums."""
    completions = ring.rows.completion_tokens * (1 + job.config.cache.kl_pairs)
    ids = 4 * (completions + ring.rows.prompt_tokens)
    needed = int(1.3 * ids * (2 if job.config.cache.token_logps else 1))
    if not isinstance(job.folder.root, Path):
        return  # a store grows
    free = fs.free_bytes(job.folder.root)
    if free < needed:
        raise StorageError(
            f"{job.folder.root}: the shards may need {needed:,} bytes and {free:,} are free. "
            "Make room, or choose another --output."
        )


def _plan(job: Job, ring: Ring, intake: Intake, quarantine: tuple[FileEntry, ...]) -> Plan:
    cache = job.config.cache
    inputs = [
        InputEntry(file.path.name, read.bytes, read.sha256, intake.rows_per_file[index])
        for index, (file, read) in enumerate(zip(job.inputs, job.digested, strict=True))
    ]
    return Plan(
        format_version=FORMAT_VERSION,
        digest="",  # set when it is written
        plan_key=job.plan_key,
        fingerprint=job.fingerprint,
        reference_key=job.reference_key,
        model=_absolute(job.config.model.path),
        adapter=_absolute(job.config.model.adapter),
        inputs=tuple(inputs),
        rows_in=intake.rows_in,
        unit_offsets=_offsets(job, ring),
        quarantine=quarantine,
        quarantined=dict(sorted(intake.reasons.items())),
        notes=_notes(job, intake),
        reuse=candidates(cache, job.folder),
        threads=usable_cores(),
    )


def _notes(job: Job, intake: Intake) -> dict[str, int]:
    """The counts of the intake; the kinds of rows only if there are two."""
    unread = {f"rows_with_scores_not_read_in_{name!r}": intake.rows_in for name in job.shape.unread}
    notes = {**intake.notes, **unread}
    if not all(notes.get(kind) for kind in KINDS):
        notes = {name: count for name, count in notes.items() if name not in KINDS}
    return {name: count for name, count in sorted(notes.items()) if count}


def _offsets(job: Job, ring: Ring) -> tuple[int, ...]:
    cache = job.config.cache
    return unit_offsets(
        ring.rows,
        num_pairs=cache.kl_pairs,
        rows_per_unit=cache.rows_per_shard,
        tokens_per_unit=cache.tokens_per_shard,
    )


def _absolute(path: str) -> str:
    return str(location(origin_of(path)).resolve()) if path else ""


@dataclass(frozen=True)
class RejectedRows:
    """Rows in quarantine."""

    counts: Mapping[str, int]  # reason -> rows
    rows_in: int
    rows_left: int
    allowed: float  # the largest share of rows_in
    files: tuple[FileEntry, ...]  # where they are listed

    @property
    def exceed_limit(self) -> bool:
        """Whether they are more than allowed, or nothing is left."""
        return not self.rows_left or sum(self.counts.values()) > self.allowed * self.rows_in

    def __str__(self) -> str:
        reasons = Counter(self.counts)
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        return (
            f"{reasons.total()} of {self.rows_in} rows cannot be used ({counts}); "
            f"--max-bad-frac allows {self.allowed:g}"
        )

    def listed(self, folder: Location) -> str:
        """The files of a cache folder that name them, the first few of many."""
        shown = [str(folder / entry.file) for entry in self.files[:SHOWN]]
        more = len(self.files) - len(shown)
        return ", ".join(shown) + (f" and {more} more files beside them" if more else "")
