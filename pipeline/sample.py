"""Sampling in order: prompts, what is missing of their samples, the table of all of them."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..schemas.config import Config
from ..schemas.errors import BadDataError, UsageError, counted
from ..schemas.json_codec import digest
from ..schemas.rows import BadRow
from ..schemas.samples import Prompt, Sample, Sampler, Sampling
from ..schemas.table_manifest import TableManifest
from ..stages.data.chat_wrap import template_unused
from ..stages.data.data_splits import require_one_split
from ..stages.data.input_files import InputFile, open_inputs
from ..stages.data.prompt_rows import PromptRows, read_prompts
from ..stages.report.alpaca_eval import require_single_turns, write_alpaca_eval
from ..stages.sample.prompts import asked_once, groups_of
from ..stages.sample.sample_table import sample_table
from ..stages.storage.cache_folder import CacheFolder
from ..stages.storage.locks import owner_lock
from ..stages.storage.manifest_file import load_manifest
from ..stages.storage.objects import Location
from ..stages.storage.tables import TableFolder, read_table
from ..stages.tracking.journaled_run import Run
from ..stages.tracking.progress import Progress
from .executors.executor import WHOLE, Executor, Share
from .executors.kinds import executor_of, require_executor
from .mlflow_sync import recorded_work
from .object_inputs import with_local_inputs
from .rejected_rows import SHOWN, RejectedRows, first_rejected
from .sample_tasks import SampleTally, SampleTasks, is_empty
from .samplers import (
    LocalSampler,
    require_same_server,
    require_sampled_model,
    sampler_of,
    sampling_of,
    wrapping_of,
)

SAMPLES_PER_GROUP = 512  # of a local model: several batches, so that few of them are not full


def sample(
    config: Config,
    *,
    progress: Progress,
    share: Share | None = None,
    alpaca_eval: Path | None = None,
) -> SampleResult:
    """Makes the table of samples that the config describes; known samples are not asked for again.

    With a share it makes that part of them, and the table if nothing is missing then.
    """
    started = time.perf_counter()
    _require_sense(config, share, alpaca_eval)
    job = _open_job(with_local_inputs(config), share)
    if alpaca_eval:
        require_single_turns(job.prompts.values())
    job.folder.prepare()
    with nullcontext() if share else owner_lock(job.folder, "sample"):
        if not share:
            job.tasks.answers.merge()
        known, tally = job.known(), SampleTally()
        manifest = _sampled(job, progress, tally) if known < job.wanted else _published(job)
    if alpaca_eval and manifest:
        made = read_table(job.folder)[1]
        write_alpaca_eval(alpaca_eval, made, job.prompts, generator=job.generator)
    seconds = time.perf_counter() - started
    return SampleResult(job.folder.root, manifest, tally, known, share, job.notes, seconds)


def _require_sense(config: Config, share: Share | None, alpaca_eval: Path | None) -> None:
    """Refuses what the settings alone get wrong, before data or a model are looked at."""
    is_served = bool(config.server.url)
    require_executor(config.scoring, share, is_served=is_served)
    if config.model.adapter and not is_served:
        from ..stages.model.folder_check import require_peft  # noqa: PLC0415 - servers need none

        require_peft()
    require_sampled_model(config.model, config.server)
    if alpaca_eval and not alpaca_eval.absolute().parent.is_dir():
        raise UsageError(f"--alpaca-eval {alpaca_eval}: no such folder. Make it, or name another.")


@dataclass(frozen=True)
class _Job:
    """Everything that is known before the first sample is drawn."""

    config: Config
    share: Share | None
    folder: TableFolder
    tasks: SampleTasks
    executor: Executor
    prompts: dict[str, Prompt]  # by their keys, in the order of the data
    counts: dict[str, int]  # of prompts and rows
    notes: tuple[str, ...]

    @property
    def wanted(self) -> int:
        """How many samples the table has."""
        return len(self.prompts) * self.tasks.n

    @property
    def generator(self) -> str:
        """What sampled, by a name that a person knows."""
        options = self.config
        return options.server.model if options.server.url else Path(options.model.path).name

    def known(self) -> int:
        """How many of the samples there are."""
        missing = (self.tasks.missing(task) for task in range(len(self.tasks.groups)))
        return self.wanted - sum(len(one.numbers) for group in missing for one in group)


def _open_job(config: Config, share: Share | None) -> _Job:
    """Reads the prompts and knows the model; loads no weights and writes nothing."""
    options = config.sample
    sampler = sampler_of(config.model, config.tokens, config.server, config.scoring)
    sampling = sampling_of(options)
    _refuse_caches(config.data.files)
    inputs = open_inputs(config.data.files)
    require_one_split(inputs, "sample", options.output)
    rows = read_prompts(inputs, config.data.map, wrapping_of(config))
    if isinstance(sampler, LocalSampler):
        rows.prompts = [*map(sampler.fitted, rows.prompts)]
    asked = asked_once(rows.prompts)
    prompts, too_long = _usable(config, inputs, rows, asked.by_key, sampler, sampling)
    folder = TableFolder.at(options.output, "samples")
    answers = folder.answers(options.answers)
    identity = dict(sampler.identity())
    executor = executor_of(config.scoring, share, sampler.device)
    size = _group_size(len(prompts), config, share, executor)
    groups = groups_of([*prompts.values()], size)
    tasks = SampleTasks(answers, sampler, identity, sampling, options.n, tuple(map(tuple, groups)))
    counts = {
        "prompts": len(prompts),
        "prompts_too_long": too_long,
        "rows_that_repeat_a_prompt": asked.repeated,
        "rows_that_cannot_be_used": rows.rows_in - asked.repeated - len(prompts) - too_long,
    }
    notes = (*_of_columns(rows), *_of_template(config, sampler, prompts))
    return _Job(config, share, folder, tasks, executor, prompts, counts, notes)


def _of_columns(rows: PromptRows) -> list[str]:
    return [f"column {name!r} is not carried: the table has its own" for name in rows.not_carried]


def _of_template(config: Config, sampler: Sampler, prompts: dict[str, Prompt]) -> list[str]:
    texts = sum(isinstance(prompt.text, str) for prompt in prompts.values())
    if config.data.wrap != "auto" or not texts or not isinstance(sampler, LocalSampler):
        return []
    return [template_unused(texts, "prompts")] if sampler.has_template else []


def _group_size(prompts: int, config: Config, share: Share | None, executor: Executor) -> int:
    """How many prompts a task has; requests to a server are sent side by side within one."""
    if config.server.url:
        return max(1, -(-prompts // (share or WHOLE).count))
    most = max(1, SAMPLES_PER_GROUP // config.sample.n)
    return most if executor.groups == 1 else max(1, min(most, prompts // executor.groups))


def _refuse_caches(files: list[str]) -> None:
    for name in files:
        cache = CacheFolder(Path(name))
        if cache.manifest.is_file() and cache.data.is_dir():
            inputs = ", ".join(entry.name for entry in load_manifest(cache).inputs)
            raise UsageError(
                f"{name} is a cache: it holds token ids, and the text of its prompts only as a "
                f"template rendered it. Name the data that it was made from: {inputs}."
            )


def _usable(
    config: Config,
    inputs: tuple[InputFile, ...],
    rows: PromptRows,
    prompts: dict[str, Prompt],
    sampler: Sampler,
    sampling: Sampling,
) -> tuple[dict[str, Prompt], int]:
    """The prompts that can be completed, and how many are too long; refuses too many bad rows."""
    refused: dict[str, BadRow] = {}
    if isinstance(sampler, LocalSampler):
        refused = dict(sampler.refused([*prompts.values()], sampling))
    too_long = sum(bad.reason == "too_long" for bad in refused.values())
    failed = [bad for bad in refused.values() if bad.reason != "too_long"]
    left = {key: prompt for key, prompt in prompts.items() if key not in refused}
    reasons = Counter(row.reason for row in rows.rejected) + Counter(bad.reason for bad in failed)
    rejected = RejectedRows(
        counts=reasons,
        rows_in=rows.rows_in,
        rows_left=rows.rows_in - reasons.total(),
        allowed=config.data.max_bad_frac,
        files=(),
    )
    if rejected.exceed_limit:
        first = first_rejected(rows.rejected, lambda file: inputs[file].path)
        first += [f"{bad.reason}: {bad.detail}" for bad in failed[:SHOWN]]
        shown = "\n  ".join(first[:SHOWN])
        raise BadDataError(
            f"{rejected}. The first of them:\n  {shown}\nFix them, or allow more with "
            "--max-bad-frac."
        )
    if not left:
        worst = next(iter(refused.values()))
        raise BadDataError(
            f"All {counted(too_long, 'prompts')} are too long ({worst.detail}). Lower "
            "--max-new-tokens, or use a model with a longer context."
        )
    return left, too_long


def _sampled(job: _Job, progress: Progress, tally: SampleTally) -> TableManifest | None:
    """Makes the executor's share of the samples that are missing, and records it."""
    local, tracking = job.folder.local, job.config.tracking
    with recorded_work(tracking, local, "sample", is_alone=not job.share) as run:
        started = time.perf_counter()
        _describe(run, job)
        _require_same_server(job)

        def count(done: SampleTally) -> None:
            tally.add(done)
            run.log_metrics(_metrics(tally, time.perf_counter() - started), step=tally.new)

        job.executor.run(job.tasks, progress=progress, on_done=count)
        manifest = _published(job)
        if manifest:
            counts = {f"table/{name}": float(count) for name, count in manifest.counts.items()}
            run.log_metrics(counts, step=tally.new)
            run.set_tags({"align.samples_root": manifest.root})
            run.log_artifact(job.folder.manifest)
    return manifest


def _require_same_server(job: _Job) -> None:
    for chat in sorted({not isinstance(prompt.text, str) for prompt in job.prompts.values()}):
        require_same_server(job.tasks.sampler, job.config.server, job.tasks.answers, chat=chat)


def _describe(run: Run, job: _Job) -> None:
    sampling = {f"sample.{name}": str(value) for name, value in asdict(job.tasks.sampling).items()}
    run.log_params({**sampling, "sample.n": str(job.tasks.n), **job.tasks.identity})
    run.set_tags({"align.samples": str(job.folder.root), "align.model_key": _model_key(job)})
    if job.share:
        run.set_tags({"align.part": str(job.share)})
    run.log_dataset(
        "prompts",
        digest=digest([*job.prompts]),
        source=", ".join(job.config.data.files),
        context="sampling",
    )


def _model_key(job: _Job) -> str:
    return digest(dict(job.tasks.identity))


def _metrics(tally: SampleTally, seconds: float) -> dict[str, float]:
    return {
        "samples/new": float(tally.new),
        "samples/cut": float(tally.cut),
        "samples/empty": float(tally.empty),
        "samples/refused_prompts": float(len(tally.refused)),
        "tokens": float(tally.completion_tokens),
        "tokens_per_second": tally.completion_tokens / max(seconds, 1e-9),
    }


def _published(job: _Job) -> TableManifest | None:
    """Writes the table, if no sample is missing but those that were refused."""
    tasks = job.tasks
    tasks.answers.look()
    keys_of = {key: [tasks.key(key, number) for number in range(tasks.n)] for key in job.prompts}
    found = ((key, tasks.answers.refused(keys_of[key]).values()) for key in job.prompts)
    refused = {key: next(iter(reasons)) for key, reasons in found if reasons}
    prompts = {key: prompt for key, prompt in job.prompts.items() if key not in refused}
    if not prompts:
        raise BadDataError(
            f"The model refuses all {counted(len(job.prompts), 'prompts')}: "
            f"{next(iter(refused.values()))}."
        )
    keys = [key for prompt in prompts for key in keys_of[prompt]]
    if tasks.answers.missing(keys):
        return None
    samples = [Sample(**answer) for _, answer in tasks.answers.of(keys)]
    table = sample_table(prompts, {(one.prompt, one.number): one for one in samples}, tasks.n)
    counts = {
        **job.counts,
        "prompts": len(prompts),
        "prompts_refused": len(refused),
        "samples": len(samples),
        "cut": sum(one.finish == "length" for one in samples),
        "empty": sum(is_empty(one.text) for one in samples),
        "prompt_tokens": sum(one.prompt_tokens for one in samples if one.number == 0),
        "completion_tokens": sum(one.completion_tokens for one in samples),
    }
    return job.folder.publish(
        table,
        made_from={"prompts": digest([*prompts]), "model": _model_key(job)},
        settings={**asdict(tasks.sampling), "n": tasks.n, "model": dict(tasks.identity)},
        counts=counts,
    )


@dataclass(frozen=True)
class SampleResult:
    """What was sampled now, and the table if nothing is missing."""

    folder: Location
    manifest: TableManifest | None  # None while other parts are not done
    tally: SampleTally
    known: int  # samples that were there before
    share: Share | None = None
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def new(self) -> int:
        """Samples that were made now."""
        return self.tally.new

    def text(self) -> str:
        """A summary of a few lines."""
        now = f"{counted(self.new, 'samples')} made now, {self.known:,} known before, in "
        lines = [f"{now}{self.seconds:.1f} s"]
        if self.manifest is None:
            part = f"part {self.share} of {self.folder} is done" if self.share else self.folder
            return "\n".join(
                [
                    f"{part}: {lines[0]}",
                    "whichever part is the last writes the table; if one does not end, the same "
                    "command without --part does what is missing",
                ]
            )
        counts = self.manifest.counts
        mean = counts["completion_tokens"] / max(counts["samples"], 1)
        lines = [
            f"{self.folder}: {counted(counts['samples'], 'samples')} of "
            f"{counted(counts['prompts'], 'prompts')}, {mean:.1f} tokens each on average",
            *lines,
            f"cut at max_new_tokens: {counts['cut']:,}; empty: {counts['empty']:,}",
            *_left_out(counts),
            *(f"note: {note}" for note in self.notes),
            f"next: align judge {self.folder} --by …",
        ]
        return "\n".join(lines)


def _left_out(counts: dict[str, int]) -> list[str]:
    named = {
        "prompts_too_long": "prompts longer than the context allows",
        "prompts_refused": "prompts that the server refuses",
        "rows_that_repeat_a_prompt": "rows that repeat a prompt",
        "rows_that_cannot_be_used": "rows that cannot be used",
    }
    found = [counted(counts[name], words) for name, words in named.items() if counts[name]]
    return [f"left out: {', '.join(found)}"] if found else []
