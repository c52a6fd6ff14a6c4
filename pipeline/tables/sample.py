"""Samples completions in order: prompts, their missing samples, the table of all of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from ...schemas.config import Config
from ...schemas.errors import BadDataError, UsageError, counted
from ...schemas.json_codec import digest
from ...schemas.samples import (
    Prompt,
    Refused,
    Sample,
    Sampler,
    Sampling,
    Wanted,
    sample_key,
)
from ...schemas.table_manifest import TableManifest
from ...stages.data.cells import template_unused
from ...stages.data.files import inputs_of
from ...stages.data.records import read_prompts
from ...stages.sample.prompts import asked_once, by_length
from ...stages.sample.sample_table import sample_table
from ...stages.storage.answers import Answers
from ...stages.storage.cache import Cache
from ...stages.storage.tables import TableFolder
from ...stages.tracking.progress import Progress
from ...stages.tracking.run_texts import data_name, description, model_name, quoted, run_name
from ..jobs.object_inputs import with_local_inputs
from ..jobs.rejected_rows import RejectedRows, first_rejected
from ..parts import Part
from ..work import Made, owned, working
from .samplers import (
    ANSWERS_AT_ONCE,
    require_kept,
    require_sampled_model,
    sampler_of,
    sampling_of,
    unknown,
    wrapping_of,
)

SampleResult: TypeAlias = "Made[TableManifest, SampleTally]"


def sample(config: Config, *, progress: Progress, part: Part | None = None) -> SampleResult:
    """Makes the table of samples that the config describes; known samples are not drawn again.

    A part draws its samples, and makes the table if nothing is missing then.
    """
    # What the settings alone get wrong, before data or a model are looked at.
    require_kept(part, config.sample.output, config.sample.answers, "sample.answers")
    if config.model.adapter and not config.server.url:
        from ...stages.model.model_folder import require_peft  # noqa: PLC0415 - servers need none

        require_peft()
    require_sampled_model(config.model, config.server)

    # The prompts of the data, each once, and the samples that are known of them.
    config, tally = with_local_inputs(config), SampleTally()
    folder = TableFolder.at(config.sample.output, "samples")
    sampler = sampler_of(config.model, config.tokens, config.server, config.scoring)
    asked = _read(config, sampler)
    samples = _Samples(
        asked.prompts,
        config.sample.n,
        sampling_of(config.sample),
        dict(sampler.identity()),
        Answers(folder.answers(config.sample.answers)),
    )
    missing = sum(len(samples.answers.missing(keys)) for keys in samples.keys.values())
    tally.known = samples.n * len(samples.prompts) - missing
    if not missing:
        with owned(folder, "sample", part):
            manifest = _published(folder, samples, asked)
        lines = _lines(folder, manifest, tally, asked.notes)
        return Made(str(folder), manifest, tally, lines, part, was_complete=True)

    named = config.server.model if config.server.url else config.model.path
    name = run_name(named, "sample", data_name(config.data.files))
    with working(folder, "sample", config.tracking, part, name=name, kept=tally.text) as run:
        settings = {
            f"sample.{name}": str(value) for name, value in asdict(samples.sampling).items()
        }
        run.log_params({**settings, "sample.n": str(samples.n), **samples.identity})
        run.set_tags({"align.samples": str(folder), "align.model_key": samples.model_key})
        prompts = counted(len(samples.prompts), "prompts")
        sentence = f"{samples.n} answers of {quoted(model_name(named))} to each of {prompts}."
        files = ", ".join(config.data.files)
        places = {"table": folder, "model": named, "prompts": files}
        run.describe(description(sentence, {**places, **settings}))
        prompt_digest = digest([*samples.prompts])
        run.log_dataset("prompts", digest=prompt_digest, source=files, context="sampling")

        own = by_length(samples.prompts.values())
        if part:
            own = own[part.number - 1 :: part.count]
        progress.begin("sampling", total=samples.n * len(own), unit="samples")
        logged = 0
        for drawn in _draw(samples, own, sampler, progress):
            tally.add(drawn)
            if tally.new >= logged + ANSWERS_AT_ONCE:
                logged = tally.new
                run.log_metrics(tally.metrics(), step=logged)
        run.log_metrics(tally.metrics(), step=tally.new)
        progress.end()

        samples.answers.look()
        manifest = _published(folder, samples, asked)
        if manifest:
            counts = {f"table/{name}": float(count) for name, count in manifest.counts.items()}
            run.log_metrics(counts, step=tally.new)
            run.set_tags({"align.samples_root": manifest.root})
    lines = _lines(folder, manifest, tally, asked.notes)
    return Made(str(folder), manifest, tally, lines, part, has_published=manifest is not None)


@dataclass(frozen=True)
class _Samples:
    """The samples that a table is made of; answers hold those that are known."""

    prompts: Mapping[str, Prompt]  # by their keys, in the order of the data
    n: int  # of each prompt
    sampling: Sampling
    identity: Mapping[str, str]  # of the model
    answers: Answers

    @cached_property
    def keys(self) -> dict[str, list[str]]:
        """The keys of the samples of each prompt."""
        return {
            prompt: [
                sample_key(prompt, number, self.sampling, self.identity) for number in range(self.n)
            ]
            for prompt in self.prompts
        }

    @property
    def model_key(self) -> str:
        """A digest of the model."""
        return digest(dict(self.identity))


def _draw(
    samples: _Samples, prompts: Sequence[Prompt], sampler: Sampler, progress: Progress
) -> Iterator[Sequence[Sample | Refused]]:
    """Draws the missing samples of prompts; they are durable before more are asked for."""
    answers, opened = samples.answers, None
    places: dict[str, tuple[str, int]] = {}  # the prompt and the number of each sample
    for prompt in prompts:
        own = prompt.key
        places |= {key: (own, number) for number, key in enumerate(samples.keys[own])}
    for missing in unknown(answers, [*places], sampler=sampler, progress=progress):
        numbers: dict[str, list[int]] = {}
        for own, number in map(places.__getitem__, missing):
            numbers.setdefault(own, []).append(number)
        wanted = [Wanted(samples.prompts[own], tuple(found)) for own, found in numbers.items()]
        opened = opened or sampler.open(samples.sampling)
        for drawn in opened.sample(wanted):
            keyed = [(samples.keys[one.prompt][one.number], one) for one in drawn]
            answers.add(
                {key: asdict(one) for key, one in keyed if isinstance(one, Sample)},
                {key: one.reason for key, one in keyed if isinstance(one, Refused)},
            )
            tokens = sum(one.completion_tokens for one in drawn if isinstance(one, Sample))
            progress.advance(len(drawn), tokens=tokens)
            yield drawn


@dataclass
class SampleTally:
    """Counts of the samples that this process has drawn."""

    new: int = 0
    cut: int = 0  # of the new ones, at max_new_tokens
    empty: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    known: int = 0  # samples that were there before
    refused: dict[str, str] = field(default_factory=dict)  # reasons by the keys of prompts
    began: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """How long it has taken so far, with the reading of the prompts."""
        return time.perf_counter() - self.began

    def add(self, drawn: Sequence[Sample | Refused]) -> None:
        """Counts samples."""
        samples = [one for one in drawn if isinstance(one, Sample)]
        self.refused |= {one.prompt: one.reason for one in drawn if isinstance(one, Refused)}
        self.new += len(samples)
        self.cut += sum(one.finish == "length" for one in samples)
        self.empty += sum(_is_empty(one) for one in samples)
        self.prompt_tokens += sum(one.prompt_tokens for one in samples)
        self.completion_tokens += sum(one.completion_tokens for one in samples)

    def metrics(self) -> dict[str, float]:
        """The counts as metrics of a tracking store."""
        return {
            "samples/new": float(self.new),
            "samples/cut": float(self.cut),
            "samples/empty": float(self.empty),
            "samples/refused_prompts": float(len(self.refused)),
            "tokens": float(self.completion_tokens),
            "tokens_per_second": self.completion_tokens / max(self.seconds, 1e-9),
        }

    def text(self) -> str:
        """The counts of new and known samples."""
        made = f"{counted(self.new, 'samples')} made now, {self.known:,} known before"
        return f"{made}, in {self.seconds:.1f} s"


def _is_empty(one: Sample) -> bool:
    return not one.text.strip()


@dataclass(frozen=True)
class _Asked:
    """The prompts of the data, by their keys and in their order, and what was left out."""

    prompts: Mapping[str, Prompt]
    left_out: Mapping[str, int]
    notes: tuple[str, ...]


def _read(config: Config, sampler: Sampler) -> _Asked:
    """Reads the prompts; refuses too many that cannot be used."""
    for name in config.data.files:
        cache = Cache(Path(name))
        if cache.manifest_file.is_file() and cache.data.is_dir():
            made_from = ", ".join(entry.name for entry in cache.manifest().inputs)
            raise UsageError(
                f"{name} is a cache: it holds the text of its prompts only as a template rendered "
                f"it. Name the data that it was made from: {made_from}."
            )
    inputs = inputs_of(config.data)
    rows = read_prompts(inputs, config.data.map, wrapping_of(config))
    asked = asked_once(map(sampler.fitted, rows.prompts))

    # Prompts that the model cannot complete: a long one is left out, any other is a bad row.
    refused = sampler.refused([*asked.by_key.values()], sampling_of(config.sample))
    too_long = [bad for bad in refused.values() if bad.reason == "too_long"]
    failed = [bad for bad in refused.values() if bad.reason != "too_long"]
    reasons = Counter(row.reason for row in rows.rejected) + Counter(bad.reason for bad in failed)
    rejected = RejectedRows(
        counts=reasons,
        rows_in=rows.rows_in,
        allowed=config.data.max_bad_frac,
    )
    first = first_rejected(rows.rejected, lambda file: inputs[file].path)
    rejected.require_few([*first, *(f"{bad.reason}: {bad.detail}" for bad in failed)])
    prompts = {key: prompt for key, prompt in asked.by_key.items() if key not in refused}
    if not prompts:
        raise BadDataError(
            f"All {counted(len(too_long), 'prompts')} are too long ({too_long[0].detail}). Lower "
            "--max-new-tokens, or use a model with a longer context."
        )

    notes = [f"column {name!r} is not carried: the table has its own" for name in rows.not_carried]
    texts = sum(isinstance(prompt.text, str) for prompt in prompts.values())
    if texts and config.data.wrap == "auto" and sampler.has_template:
        notes.append(template_unused(texts, "prompts"))
    left_out = {
        "prompts_too_long": len(too_long),
        "rows_that_repeat_a_prompt": asked.repeated,
        "rows_that_cannot_be_used": (rows.rows_in - asked.repeated - len(prompts) - len(too_long)),
    }
    return _Asked(prompts, left_out, tuple(notes))


def _published(folder: TableFolder, samples: _Samples, asked: _Asked) -> TableManifest | None:
    """Writes the table, unless a sample is missing that was not refused."""
    answers, keys = samples.answers, samples.keys
    reasons = answers.refused(key for own in keys.values() for key in own)
    refused = {prompt for prompt, own in keys.items() if not reasons.keys().isdisjoint(own)}
    prompts = {key: prompt for key, prompt in samples.prompts.items() if key not in refused}
    if not prompts:
        raise BadDataError(
            f"The model refuses all {counted(len(refused), 'prompts')}: "
            f"{next(iter(reasons.values()))}."
        )
    own = [key for prompt in prompts for key in keys[prompt]]
    if answers.missing(own):
        return None
    drawn = [Sample(**answer) for _, answer in answers.of(own)]
    table = sample_table(prompts, {(one.prompt, one.number): one for one in drawn}, samples.n)
    return folder.publish(
        table,
        made_from={"prompts": digest([*prompts]), "model": samples.model_key},
        settings={**asdict(samples.sampling), "n": samples.n, "model": dict(samples.identity)},
        counts={
            **asked.left_out,
            "prompts": len(prompts),
            "prompts_refused": len(refused),
            "samples": len(drawn),
            "cut": sum(one.finish == "length" for one in drawn),
            "empty": sum(map(_is_empty, drawn)),
            "prompt_tokens": sum(one.prompt_tokens for one in drawn if one.number == 0),
            "completion_tokens": sum(one.completion_tokens for one in drawn),
        },
    )


LEFT_OUT = {
    "prompts_too_long": "prompts longer than the context allows",
    "prompts_refused": "prompts that the server refuses",
    "rows_that_repeat_a_prompt": "rows that repeat a prompt",
    "rows_that_cannot_be_used": "rows that cannot be used",
}


def _lines(
    folder: TableFolder, manifest: TableManifest | None, tally: SampleTally, notes: Sequence[str]
) -> tuple[str, ...]:
    """A summary of the table: its samples, their mean length, and what was left out."""
    if manifest is None:
        return ()
    counts = manifest.counts
    mean = counts["completion_tokens"] / max(counts["samples"], 1)
    left = [counted(counts[name], words) for name, words in LEFT_OUT.items() if counts[name]]
    return (
        f"{folder}: {counted(counts['samples'], 'samples')} of "
        f"{counted(counts['prompts'], 'prompts')}, {mean:.1f} tokens each on average",
        tally.text(),
        f"cut at max_new_tokens: {counts['cut']:,}; empty: {counts['empty']:,}",
        *([f"left out: {', '.join(left)}"] if left else []),
        *(f"note: {note}" for note in notes),
        f"next: align judge {folder} --by …",
    )
