"""Makes the plan from the input files: the job, the encoded rows, and how many each shard has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.cache import FORMAT_VERSION, InputEntry, Plan, file_identity
from ...schemas.config import Config
from ...schemas.errors import BadDataError, CorruptionError, StorageError, UsageError, counted
from ...schemas.json_codec import digest
from ...schemas.row_keys import InputCounts
from ...schemas.rows import Reference
from ...schemas.samples import Drawing
from ...stages.data.cells import template_unused
from ...stages.data.columns import common_shape, not_read, require_scores, require_whole
from ...stages.data.encode import has_turns
from ...stages.data.files import (
    Digested,
    InputFile,
    data_bytes,
    digested,
    inputs_of,
    require_one_split,
    require_unchanged,
    slices_of,
)
from ...stages.data.records import first_records
from ...stages.data.shapes import Shape
from ...stages.data.slice_encoder import EncodingJob
from ...stages.data.tokenizer import TextTokenizer, load_tokenizer, tokenizer_fingerprint
from ...stages.model.loading.model_folder import require_peft
from ...stages.pairing.partition import likeliest_majority, number_of_ranges
from ...stages.storage.cache.cache_folder import CacheFolder, WorkFolder
from ...stages.storage.cache.commits import write_rejected
from ...stages.storage.cache.manifest_file import PLANS, load_manifest
from ...stages.storage.copies import origin_of
from ...stages.storage.disk import fs
from ...stages.storage.locations import is_remote
from ...stages.storage.tables import drawing_of
from ..executors.executor import Executor, Runner
from ..executors.processes import require_executor
from ..jobs.rejected_rows import RejectedRows, first_rejected
from ..parts import Part
from ..workers import usable_cores
from .cache_compatibility import candidates, fingerprint
from .prepare_tasks import Encoded, EncodeTasks, joined_slices

if TYPE_CHECKING:
    from ...stages.tracking.progress import Progress


STAGE_ONE = "precompute-ref"


@dataclass(frozen=True)
class CacheJob:
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

    @cached_property
    def encoding(self) -> EncodeTasks:
        """The tasks of encoding, the same in every process."""
        columns = self.shape.columns
        total = data_bytes(self.inputs, columns)
        return EncodeTasks(
            work=self.work,
            encoding=EncodingJob(
                self.config.model.path,
                self.config.tokens,
                self.shape,
                self.files,
                tokenizer_fingerprint(self.tokenizer),
            ),
            inputs=self.inputs,
            digested=self.digested,
            slices=joined_slices(slices_of(self.inputs, columns, total=total), total),
            ranges=number_of_ranges(total, self.config.cache.shards),
        )

    @property
    def is_published(self) -> bool:
        """Whether the folder already holds the finished cache of this job."""
        folder = self.folder
        return folder.manifest.exists() and load_manifest(folder).plan_key == self.plan_key


def require_model(config: Config, share: Part | None = None) -> None:
    """Refuses what the settings alone get wrong, before data or a model are looked at."""
    if not config.model.path:
        raise UsageError(
            "No reference model. Pass --model DIR, set ALIGN_MODEL, or run `align init` and set "
            "model.path in align.yaml."
        )
    if config.model.adapter:
        require_peft()
    require_executor(config.scoring, share)


def open_job(config: Config, reference: Reference, stage: str = STAGE_ONE) -> CacheJob:
    """Opens the data, the tokenizer and the reference; writes nothing.

    `stage` is the command: where it is not STAGE_ONE, completions may have no scores yet.
    """
    opened = inputs_of(config.data)
    if stage == STAGE_ONE:
        require_one_split(opened)
    tokenizer = load_tokenizer(config.model.path, config.tokens)
    reference.hidden_size()  # before bytes are digested: a device or a config may be missing
    inputs, before = _in_order(opened)
    shape = common_shape(inputs, config.data.map, config.data.carry)
    require_whole(inputs, shape)
    if stage == STAGE_ONE:
        require_scores(inputs, shape)
    shape = replace(shape, wrap=tokenizer.wrapping(config.data.wrap))
    first = [*first_records(inputs, shape)]
    if any(record.is_conversation for record in first):
        tokenizer.require_template()
    identity = dict(reference.identity())
    fields = fingerprint(
        config,
        files=digest([file.sha256 for file in before]),
        shape=digest({"kind": shape.kind, "source": shape.source, "carried": shape.carried}),
        tokenizer=tokenizer_fingerprint(tokenizer),
        model=identity,
        has_turns=any(map(has_turns, first)),
    )
    return CacheJob(
        config=config,
        reference=reference,
        folder=CacheFolder.at(config.cache.output),
        inputs=inputs,
        digested=before,
        shape=shape,
        tokenizer=tokenizer,
        fingerprint=fields,
        plan_key=digest(fields),
        reference_key=digest(identity),
    )


def _in_order(
    inputs: tuple[InputFile, ...],
) -> tuple[tuple[InputFile, ...], tuple[Digested, ...]]:
    """The files by digest, then by name: the order they were given in has no effect."""
    found = [(digested(file), file) for file in inputs]
    found.sort(key=lambda each: (each[0].sha256, each[1].path.name))
    return tuple(file for _, file in found), tuple(before for before, _ in found)


KINDS = ("rows_of_conversations", "rows_of_plain_text")


def make_plan(job: CacheJob, run_id: str, executor: Executor, progress: Progress) -> Plan:
    """Encodes all rows, and writes the plan of what to score."""
    more = f" and {counted(len(job.inputs) - 1, 'files')} more" if job.inputs[1:] else ""
    progress.say(f"{job.inputs[0].path.name}{more}: read as {job.shape.told}")
    if job.shape.unread:
        progress.say(not_read(job.shape.unread))
    encoded = encode(job, executor, progress)
    counts = encoded.counts
    texts = counts.notes["rows_of_plain_text"]
    if texts and job.config.data.wrap == "auto" and job.tokenizer.chat:
        progress.say(f"note: {template_unused(texts, 'rows')}")
    _require_usable(job, counts, run_id)
    if job.config.cache.kl_pairs:
        _require_partners(encoded)
    _require_space(job, encoded)
    plan = PLANS.put(job.work.plan, _plan(job, encoded))
    if job.folder.url:
        job.folder.share(job.work.plan)
        plan = PLANS.read(job.work.plan)
    return plan


def encode(job: CacheJob, executor: Executor, progress: Progress) -> Encoded:
    """Encodes the slices of the data that are not encoded yet."""
    tasks = job.encoding
    try:
        _of_preparing(job, executor).run(tasks, progress=progress, on_done=lambda rows: None)
    except BadDataError:
        require_unchanged(job.inputs, job.digested)  # the better reason
        raise
    # Only now: Parquet and mapped files are read here and there, some of it after the last chunk.
    require_unchanged(job.inputs, job.digested)
    return Encoded(tasks, tasks.records())


def encode_again(job: CacheJob, plan: Plan, executor: Executor, progress: Progress) -> None:
    """Encodes what this machine lacks of the rows of a plan."""
    job.work.prepare()
    if encode(job, executor, progress).shards(job.config.cache.shards) != plan.shards:
        raise CorruptionError(
            f"{job.folder.shown(job.work.root)}: its rows, prepared again, differ from its plan. "
            "Delete it and run again; all rows that no other cache holds are then scored again."
        )


def _of_preparing(job: CacheJob, executor: Executor) -> Runner:
    is_small = sum(file.bytes for file in job.inputs) < SMALL_INPUT_BYTES
    return executor.for_preparing(is_small=is_small, workers=job.config.data.workers)


# Below this, starting processes costs more than they save.
SMALL_INPUT_BYTES = 8 * 1024 * 1024


def _require_usable(job: CacheJob, counts: InputCounts, run_id: str) -> None:
    rejected = RejectedRows(
        counts=counts.reasons,
        rows_in=counts.rows_in,
        rows_left=counts.rows_in - counts.reasons.total(),
        allowed=job.config.data.max_bad_frac,
    )
    if not rejected.exceed_limit:
        return
    hint = ""
    if counts.reasons["empty_prompt"] and not job.shape.has_prompt:
        hint = " If the prompts are in a column of another name, pass --map prompt=NAME."
    names = {file: path.name for file, path in job.paths.items()}
    write_rejected(job.work, run_id, counts.rejected, names)
    rejected.require_few(
        first_rejected(counts.rejected, job.paths.__getitem__),
        listed=job.folder.shown(job.folder.rejected) if counts.rejected else "",
        hint=hint,
    )


def _require_partners(encoded: Encoded) -> None:
    """Refuses data of which most completions are of one prompt, or all one text."""
    total = sum(one.completions for one in encoded.records)
    if prompt := likeliest_majority(encoded.records):
        rows = encoded.rows(shards=encoded.tasks.ranges)
        if 2 * (largest := rows.completions_of(int(prompt, 16))) > total:
            raise BadDataError(
                f"One prompt holds {largest} of all {total} completions, so they cannot all be "
                "paired with another prompt's completion (KTO's mismatched pairs). "
                "Add rows with other prompts, or pass --kl-pairs 0."
            )
    lowest, highest = zip(*(one.texts for one in encoded.records), strict=True)
    if min(lowest) == max(highest):
        raise BadDataError(
            "Every completion is the same text, so a mismatched pair (KTO's KL term) would not be "
            "a mismatch. Add rows with other completions, or pass --kl-pairs 0."
        )


def _require_space(job: CacheJob, encoded: Encoded) -> None:
    """Refuses early when the shards cannot fit, by the raw size of their ids and sums."""
    pairs = job.config.cache.kl_pairs
    tokens = sum(one.prompt_tokens + (1 + pairs) * one.completion_tokens for one in encoded.records)
    needed = int(1.3 * 4 * tokens * (2 if job.config.cache.token_logps else 1))
    free = fs.free_bytes(job.folder.root)
    if not job.folder.url and free < needed:
        raise StorageError(
            f"{job.folder}: the shards may need {needed:,} bytes and {free:,} are free. "
            "Make room, or choose another --output."
        )


def _plan(job: CacheJob, encoded: Encoded) -> Plan:
    counts = encoded.counts
    inputs = [
        InputEntry(file.path.name, read.bytes, read.sha256, counts.rows_per_file[index])
        for index, (file, read) in enumerate(zip(job.inputs, job.digested, strict=True))
    ]
    return Plan(
        format_version=FORMAT_VERSION,
        plan_key=job.plan_key,
        fingerprint=job.fingerprint,
        reference_key=job.reference_key,
        model=_absolute(job.config.model.path),
        adapter=_absolute(job.config.model.adapter),
        inputs=tuple(inputs),
        rows_in=counts.rows_in,
        shards=encoded.shards(job.config.cache.shards),
        rejected=tuple(counts.rejected),
        quarantined=dict(sorted(counts.reasons.items())),
        notes=_notes(job, counts),
        reuse=candidates(job.config.cache),
        threads=usable_cores(),
        sampling=_sampling(job),
    )


def _sampling(job: CacheJob) -> tuple[Drawing | None, ...]:
    """The sampling of each input's samples; empty if none is known."""
    found = tuple(drawing_of(file.path) for file in job.inputs)
    return found if any(found) else ()


def _notes(job: CacheJob, counts: InputCounts) -> dict[str, int]:
    """The counts of the input rows; the kinds of rows only if there are two."""
    notes: dict[str, int] = dict(counts.notes)
    if not all(notes.get(kind) for kind in KINDS):
        notes = {name: count for name, count in notes.items() if name not in KINDS}
    return {name: count for name, count in sorted(notes.items()) if count}


def _absolute(path: str) -> str:
    origin = origin_of(path)
    return origin if not path or is_remote(origin) else str(Path(origin).resolve())
