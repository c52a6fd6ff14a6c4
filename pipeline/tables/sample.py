"""Sampling in order: prompts, their missing samples, the table of all of them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from ...schemas.config import Config
from ...schemas.errors import BadDataError, UsageError, counted
from ...schemas.json_codec import digest
from ...schemas.samples import Prompt, Sample, Sampler, Sampling
from ...schemas.table_manifest import TableManifest
from ...stages.data.cells import template_unused
from ...stages.data.files import InputFile, inputs_of, require_one_split
from ...stages.data.records import PromptRows, read_prompts
from ...stages.sample.prompts import asked_once, by_length
from ...stages.sample.sample_table import sample_table
from ...stages.storage.cache.cache_folder import CacheFolder
from ...stages.storage.cache.manifest_file import load_manifest
from ...stages.storage.tables import TableFolder
from ...stages.tracking.journaled_run import Run
from ...stages.tracking.progress import Progress
from ...stages.tracking.run_texts import data_name, description, model_name, quoted, run_name
from ..executors.executor import Share
from ..jobs.job import Call, Made, carry_out
from ..jobs.object_inputs import with_local_inputs
from ..jobs.rejected_rows import RejectedRows, first_rejected
from .answer_tasks import in_this_process, require_kept, task_size
from .sample_tasks import SampleTally, SampleTasks, is_empty
from .samplers import require_sampled_model, sampler_of, sampling_of, wrapping_of

SampleResult: TypeAlias = Made[TableManifest, SampleTally]


def sample(
    config: Config,
    *,
    progress: Progress,
    share: Share | None = None,
) -> SampleResult:
    """Makes the table of samples that the config describes; known samples are not asked for again.

    With a share it makes that part of them, and the table if nothing is missing then.
    """
    _require_sense(config, share)
    began = time.perf_counter()
    local = with_local_inputs(in_this_process(config))
    made = carry_out(_opened(local, share), progress=progress)
    made.tally.seconds = time.perf_counter() - began  # of reading and digesting too
    return made


def _require_sense(config: Config, share: Share | None) -> None:
    """Refuses what the settings alone get wrong, before data or a model are looked at."""
    require_kept(share, config.sample.output, config.sample.answers, "sample.answers")
    if config.model.adapter and not config.server.url:
        from ...stages.model.loading.model_folder import require_peft  # noqa: PLC0415 - servers need none

        require_peft()
    require_sampled_model(config.model, config.server)


@dataclass(frozen=True)
class SampleJob:
    """Everything that is known before the first sample is drawn."""

    config: Config
    share: Share | None
    sampler: Sampler
    identity: dict[str, str]  # of the sampler
    sampling: Sampling
    prompts: dict[str, Prompt]  # by their keys, in the order of the data
    counts: dict[str, int]  # of prompts and rows
    notes: tuple[str, ...]
    tally: SampleTally = field(default_factory=SampleTally)

    stage = "sample"
    noun = "table"

    @property
    def folder(self) -> TableFolder:
        """The folder of the table."""
        return TableFolder.at(self.config.sample.output, "samples")

    @property
    def run_name(self) -> str:
        """The model, the stage and the prompts."""
        return run_name(self.named, self.stage, data_name(self.config.data.files))

    @property
    def device(self) -> str:
        """The device of the model."""
        return self.sampler.device

    @property
    def named(self) -> str:
        """The model that samples, as the user names it."""
        options = self.config
        return options.server.model if options.server.url else options.model.path

    @cached_property
    def tasks(self) -> SampleTasks:
        """Groups of prompts of about one length."""
        config = self.config
        prompts, n = by_length(self.prompts.values()), config.sample.n
        size = task_size(len(prompts), n, self.share, self.device)
        return SampleTasks(
            self.folder.answers(config.sample.answers),
            self.sampler,
            self.identity,
            self.sampling,
            n,
            tuple(tuple(prompts[at : at + size]) for at in range(0, len(prompts), size)),
        )

    @cached_property
    def keys(self) -> dict[str, list[str]]:
        """The keys of all samples, by those of their prompts."""
        tasks = self.tasks
        return {key: [tasks.key(key, number) for number in range(tasks.n)] for key in self.prompts}

    def finished(self, *, is_prepared: bool) -> TableManifest | None:
        """The table, if all samples are known: they decide it, not an existing table."""
        if not is_prepared:
            return None
        answers = self.tasks.answers
        missing = sum(len(answers.missing(keys)) for keys in self.keys.values())
        self.tally.known = len(self.prompts) * self.tasks.n - missing
        return None if missing else self._published()

    def make(self, call: Call[SampleTally]) -> TableManifest | None:
        """Draws the missing samples of its share, and publishes the table if none is left."""
        self._describe(call.run)
        tasks = self.tasks
        call.work(tasks)
        tasks.answers.look()
        manifest = self._published()
        if manifest:
            call.has_published = True
            counts = {f"table/{name}": float(count) for name, count in manifest.counts.items()}
            call.run.log_metrics(counts, step=self.tally.step)
            call.run.set_tags({"align.samples_root": manifest.root})
        return manifest

    def _describe(self, run: Run) -> None:
        sampling = {f"sample.{name}": str(value) for name, value in asdict(self.sampling).items()}
        run.log_params({**sampling, "sample.n": str(self.tasks.n), **self.identity})
        run.set_tags({"align.samples": str(self.folder.root), "align.model_key": self._model_key})
        prompts = counted(len(self.prompts), "prompts")
        sentence = (
            f"{self.tasks.n} answers of {quoted(model_name(self.named))} to each of {prompts}."
        )
        files = ", ".join(self.config.data.files)
        places = {"table": self.folder.root, "model": self.named, "prompts": files}
        run.describe(description(sentence, {**places, **sampling}))
        run.log_dataset(
            "prompts",
            digest=digest([*self.prompts]),
            source=files,
            context="sampling",
        )

    @property
    def _model_key(self) -> str:
        return digest(self.identity)

    def _published(self) -> TableManifest | None:
        """Writes the table, if no sample is missing but those that were refused."""
        tasks, answers = self.tasks, self.tasks.answers
        reasons = answers.refused(key for keys in self.keys.values() for key in keys)
        refused = {
            prompt: reasons[key]
            for prompt, keys in self.keys.items()
            for key in reversed(keys)  # of several reasons the first
            if key in reasons
        }
        prompts = {key: prompt for key, prompt in self.prompts.items() if key not in refused}
        if not prompts:
            raise BadDataError(
                f"The model refuses all {counted(len(self.prompts), 'prompts')}: "
                f"{next(iter(refused.values()))}."
            )
        keys = [key for prompt in prompts for key in self.keys[prompt]]
        if answers.missing(keys):
            return None
        samples = [Sample(**answer) for _, answer in answers.of(keys)]
        table = sample_table(prompts, {(one.prompt, one.number): one for one in samples}, tasks.n)
        counts = {
            **self.counts,
            "prompts": len(prompts),
            "prompts_refused": len(refused),
            "samples": len(samples),
            "cut": sum(one.finish == "length" for one in samples),
            "empty": sum(is_empty(one.text) for one in samples),
            "prompt_tokens": sum(one.prompt_tokens for one in samples if one.number == 0),
            "completion_tokens": sum(one.completion_tokens for one in samples),
        }
        return self.folder.publish(
            table,
            made_from={"prompts": digest([*prompts]), "model": self._model_key},
            settings={**asdict(tasks.sampling), "n": tasks.n, "model": self.identity},
            counts=counts,
        )

    def lines(self, made: TableManifest, *, was_complete: bool) -> list[str]:
        """The number of samples, their mean length, and the prompts left out."""
        counts = made.counts
        mean = counts["completion_tokens"] / max(counts["samples"], 1)
        return [
            f"{self.folder.root}: {counted(counts['samples'], 'samples')} of "
            f"{counted(counts['prompts'], 'prompts')}, {mean:.1f} tokens each on average",
            self.tally.text(),
            f"cut at max_new_tokens: {counts['cut']:,}; empty: {counts['empty']:,}",
            *_left_out(counts),
            *(f"note: {note}" for note in self.notes),
            f"next: align judge {self.folder.root} --by …",
        ]


def _opened(config: Config, share: Share | None) -> SampleJob:
    """Reads the prompts and knows the model; loads no weights and writes nothing."""
    sampler = sampler_of(config.model, config.tokens, config.server, config.scoring)
    sampling = sampling_of(config.sample)
    _refuse_caches(config.data.files)
    inputs = inputs_of(config.data)
    require_one_split(inputs)
    rows = read_prompts(inputs, config.data.map, wrapping_of(config))
    asked = asked_once(map(sampler.fitted, rows.prompts))
    prompts, too_long = _usable(config, inputs, rows, asked.by_key, sampler, sampling)
    counts = {
        "prompts": len(prompts),
        "prompts_too_long": too_long,
        "rows_that_repeat_a_prompt": asked.repeated,
        "rows_that_cannot_be_used": rows.rows_in - asked.repeated - len(prompts) - too_long,
    }
    notes = [f"column {name!r} is not carried: the table has its own" for name in rows.not_carried]
    texts = sum(isinstance(prompt.text, str) for prompt in prompts.values())
    if texts and config.data.wrap == "auto" and sampler.has_template:
        notes.append(template_unused(texts, "prompts"))
    identity = dict(sampler.identity())
    return SampleJob(config, share, sampler, identity, sampling, prompts, counts, tuple(notes))


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
    refused = sampler.refused([*prompts.values()], sampling)
    too_long = sum(bad.reason == "too_long" for bad in refused.values())
    failed = [bad for bad in refused.values() if bad.reason != "too_long"]
    left = {key: prompt for key, prompt in prompts.items() if key not in refused}
    reasons = Counter(row.reason for row in rows.rejected) + Counter(bad.reason for bad in failed)
    rejected = RejectedRows(
        counts=reasons,
        rows_in=rows.rows_in,
        rows_left=rows.rows_in - reasons.total(),
        allowed=config.data.max_bad_frac,
    )
    first = first_rejected(rows.rejected, lambda file: inputs[file].path)
    rejected.require_few([*first, *(f"{bad.reason}: {bad.detail}" for bad in failed)])
    if not left:
        worst = next(iter(refused.values()))
        raise BadDataError(
            f"All {counted(too_long, 'prompts')} are too long ({worst.detail}). Lower "
            "--max-new-tokens, or use a model with a longer context."
        )
    return left, too_long


def _left_out(counts: dict[str, int]) -> list[str]:
    named = {
        "prompts_too_long": "prompts longer than the context allows",
        "prompts_refused": "prompts that the server refuses",
        "rows_that_repeat_a_prompt": "rows that repeat a prompt",
        "rows_that_cannot_be_used": "rows that cannot be used",
    }
    found = [counted(counts[name], words) for name, words in named.items() if counts[name]]
    return [f"left out: {', '.join(found)}"] if found else []
