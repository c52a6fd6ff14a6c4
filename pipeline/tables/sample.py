"""`align sample`: the prompts, the samples that are missing, and the table of all of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ...schemas.config import Config
from ...schemas.errors import BadDataError, UsageError, counted, logger
from ...schemas.json_codec import digest
from ...schemas.samples import (
    Drawing,
    Prompt,
    Refused,
    Sample,
    Sampler,
    Sampling,
    Wanted,
    sample_key,
)
from ...stages.data.cells import template_unused
from ...stages.data.files import inputs_of
from ...stages.data.text_rows import read_prompts
from ...stages.sample.sample_table import sample_table, unique_prompts
from ...stages.storage.answers import Answers
from ...stages.storage.cache import Cache
from ...stages.storage.tables import TableFolder, TableManifest
from ...stages.tracking.progress import Progress
from ...stages.tracking.run_texts import data_name, description, model_name, quoted, run_name
from ..jobs.object_inputs import with_local_inputs
from ..jobs.rejected_rows import RejectedRows, first_rejected
from ..parts import Part
from ..work import CommandResult, owned, working
from .samplers import (
    ANSWERS_AT_ONCE,
    require_kept,
    require_sampled_model,
    sampler_of,
    sampling_of,
    unknown,
    wrapping_of,
)

SampleResult: TypeAlias = "CommandResult[TableManifest, SampleCounts]"

LEFT_OUT = {
    "prompts_too_long": "prompts longer than the context allows",
    "prompts_refused": "prompts that the server refuses",
    "rows_that_repeat_a_prompt": "rows that repeat a prompt",
    "rows_that_cannot_be_used": "rows that cannot be used",
}


def sample(
    config: Config,
    *,
    progress: Progress,
    part: Part | None = None,
    sampler: Sampler | None = None,
) -> SampleResult:
    """Makes the table of samples that the config describes; known samples are not drawn again.

    A part draws its samples, and makes the table if nothing is missing then. `sampler` stands for
    the model that the settings would name.
    """
    # What the settings alone get wrong, before data or a model are looked at.
    options, counts = config.sample, SampleCounts()
    require_kept(part, options.output, options.answers, "sample.answers")
    if config.model.adapter and not config.server.url:
        from ...stages.model.model_folder import require_peft  # noqa: PLC0415 - servers need none

        require_peft()
    if sampler is None:
        require_sampled_model(config.model, config.server)

    # The prompts of the data, each once, and the samples that are known of them.
    config = with_local_inputs(config)
    sampler = sampler or sampler_of(config.model, config.tokens, config.server, config.scoring)
    asked = _read(config, sampler)
    folder = TableFolder.at(options.output, "samples")
    sampling, identity = sampling_of(options), dict(sampler.identity())
    numbers = {**asdict(sampling), "n": options.n}
    settings = {**numbers, "model": identity}
    keys = {
        prompt: [sample_key(prompt, number, sampling, identity) for number in range(options.n)]
        for prompt in asked.prompts
    }
    answers = Answers(folder.answers(options.answers))
    counts.known = sum(len(own) - len(answers.missing(own)) for own in keys.values())
    if counts.known == options.n * len(asked.prompts):
        with owned(folder, "sample", part):
            manifest = _published(folder, asked, keys, answers, settings)
        lines = _lines(folder, manifest, counts, asked.notes)
        return CommandResult(str(folder), manifest, counts, lines, part, was_complete=True)

    named = config.server.model if config.server.url else config.model.path
    name = run_name(named, "sample", data_name(config.data.files))
    with working(folder, "sample", config.tracking, part, name=name, kept=counts.text) as run:
        params = {f"sample.{name}": str(value) for name, value in numbers.items()}
        run.log_params({**params, **identity})
        files = ", ".join(config.data.files)
        run.set_tags({"align.samples": str(folder), "align.model_key": digest(identity)})
        sentence = (
            f"{options.n} answers of {quoted(model_name(named))} to each of "
            f"{counted(len(asked.prompts), 'prompts')}."
        )
        facts = {"table": folder, "model": named, "prompts": files, **params}
        run.describe(description(sentence, facts))
        run.log_dataset(
            "prompts", digest=digest([*asked.prompts]), source=files, context="sampling"
        )

        # Those of about one length beside each other, whatever order they came in.
        own = sorted(asked.prompts.values(), key=lambda one: (len(str(one.text)), one.key))
        own = own[part.number - 1 :: part.count] if part else own
        progress.begin("sampling", total=options.n * len(own), unit="samples")
        logged = 0
        for drawn in _draw(own, keys, answers, sampler, sampling, progress):
            counts.add(drawn)
            if counts.new >= logged + ANSWERS_AT_ONCE:
                logged = counts.new
                run.log_metrics(counts.metrics(), step=logged)
        run.log_metrics(counts.metrics(), step=counts.new)
        progress.end()

        answers.look()
        manifest = _published(folder, asked, keys, answers, settings)
        if manifest:
            totals = {f"table/{name}": float(count) for name, count in manifest.counts.items()}
            run.log_metrics(totals, step=counts.new)
            run.set_tags({"align.samples_root": manifest.root})
    lines = _lines(folder, manifest, counts, asked.notes)
    return CommandResult(
        str(folder), manifest, counts, lines, part, has_published=manifest is not None
    )


def _draw(
    prompts: Sequence[Prompt],
    keys: Mapping[str, Sequence[str]],
    answers: Answers,
    sampler: Sampler,
    sampling: Sampling,
    progress: Progress,
) -> Iterator[Sequence[Sample | Refused]]:
    """Draws the missing samples of prompts; they are durable before more are asked for."""
    opened = None
    places = {key: (one, n) for one in prompts for n, key in enumerate(keys[one.key])}
    for missing in unknown(answers, [*places], sampler=sampler, progress=progress):
        wanted: dict[str, Wanted] = {}
        for key in missing:
            prompt, number = places[key]
            found = wanted.get(prompt.key, Wanted(prompt, ()))
            wanted[prompt.key] = Wanted(prompt, (*found.numbers, number))
        opened = opened or sampler.open(sampling)
        for drawn in opened.sample([*wanted.values()]):
            keyed = [(keys[one.prompt][one.number], one) for one in drawn]
            answers.add(
                {key: asdict(one) for key, one in keyed if isinstance(one, Sample)},
                {key: one.reason for key, one in keyed if isinstance(one, Refused)},
            )
            tokens = sum(one.completion_tokens for one in drawn if isinstance(one, Sample))
            progress.advance(len(drawn), tokens=tokens)
            yield drawn


@dataclass
class SampleCounts:
    """Counts of the samples that this process has drawn."""

    new: int = 0
    completion_tokens: int = 0
    known: int = 0  # samples that were there before
    refused: set[str] = field(default_factory=set)  # keys of prompts
    began: float = field(default_factory=time.perf_counter)

    def add(self, drawn: Sequence[Sample | Refused]) -> None:
        """Counts samples."""
        samples = [one for one in drawn if isinstance(one, Sample)]
        self.refused |= {one.prompt for one in drawn if isinstance(one, Refused)}
        self.new += len(samples)
        self.completion_tokens += sum(one.completion_tokens for one in samples)

    def metrics(self) -> dict[str, float]:
        """The counts as metrics of a tracking store."""
        seconds = time.perf_counter() - self.began  # with the reading of the prompts
        return {
            "samples/new": float(self.new),
            "samples/refused_prompts": float(len(self.refused)),
            "tokens": float(self.completion_tokens),
            "tokens_per_second": self.completion_tokens / max(seconds, 1e-9),
        }

    def text(self) -> str:
        """The counts of new and known samples."""
        made = f"{counted(self.new, 'samples')} made now, {self.known:,} known before"
        return f"{made}, in {time.perf_counter() - self.began:.1f} s"


@dataclass(frozen=True)
class _Asked:
    """The prompts of the data, by their keys and in their order, and what was left out."""

    prompts: Mapping[str, Prompt]
    left_out: Mapping[str, int]
    notes: Sequence[str]


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
    prompts = unique_prompts(map(sampler.fitted, rows.prompts))

    # Prompts that the model cannot complete: a long one is left out, any other is a bad row.
    refused = sampler.refused([*prompts.values()], sampling_of(config.sample))
    too_long = [bad for bad in refused.values() if bad.reason == "too_long"]
    failed = [bad for bad in refused.values() if bad.reason != "too_long"]
    reasons = Counter(row.reason for row in rows.rejected) + Counter(bad.reason for bad in failed)
    rejected = RejectedRows(reasons, rows.rows_in, allowed=config.data.max_bad_frac)
    first = first_rejected(rows.rejected, lambda file: inputs[file].path)
    rejected.require_few([*first, *(f"{bad.reason}: {bad.detail}" for bad in failed)])
    left_out = {
        "prompts_too_long": len(too_long),
        "rows_that_repeat_a_prompt": len(rows.prompts) - len(prompts),
        "rows_that_cannot_be_used": len(rows.rejected) + len(failed),
    }
    prompts = {key: prompt for key, prompt in prompts.items() if key not in refused}
    if not prompts:
        raise BadDataError(
            f"All {counted(len(too_long), 'prompts')} are too long ({too_long[0].detail}). Lower "
            "--max-new-tokens, or use a model with a longer context."
        )

    notes = [f"column {name!r} is not carried: the table has its own" for name in rows.not_carried]
    texts = sum(isinstance(prompt.text, str) for prompt in prompts.values())
    if texts and config.data.wrap == "auto" and sampler.has_template:
        notes.append(template_unused(texts, "prompts"))
    return _Asked(prompts, left_out, notes)


def _published(
    folder: TableFolder,
    asked: _Asked,
    keys: Mapping[str, Sequence[str]],
    answers: Answers,
    settings: Mapping[str, Any],
) -> TableManifest | None:
    """Writes the table, unless a sample is missing that was not refused."""
    reasons = answers.refused(key for own in keys.values() for key in own)
    prompts = {
        prompt: asked.prompts[prompt]
        for prompt, own in keys.items()
        if reasons.keys().isdisjoint(own)
    }
    refused = len(keys) - len(prompts)
    if refused:
        first = next(iter(reasons.values()))
        what = f"the model refuses {refused:,} of {counted(len(keys), 'prompts')}"
        if not prompts:
            raise UsageError(f"{what}: {first}. Change the setting or the model that it names.")
        logger.warning("%s, the first with: %s", what, first)
    own = [key for prompt in prompts for key in keys[prompt]]
    if answers.missing(own):
        return None
    found = dict(answers.of(own))
    drawn = [Sample(**found[key]) for key in own]
    return folder.publish(
        sample_table(prompts, drawn),
        made_from={"prompts": digest([*prompts]), "model": digest(settings["model"])},
        settings=settings,
        counts={
            **asked.left_out,
            "prompts": len(prompts),
            "prompts_refused": refused,
            "samples": len(drawn),
            "cut": sum(one.finish == "length" for one in drawn),
            "empty": sum(not one.text.strip() for one in drawn),
            "prompt_tokens": sum(one.prompt_tokens for one in drawn if one.number == 0),
            "completion_tokens": sum(one.completion_tokens for one in drawn),
        },
        sampling=Drawing(settings["temperature"], settings["top_p"], settings["top_k"]),
    )


def _lines(
    folder: TableFolder, manifest: TableManifest | None, counts: SampleCounts, notes: Sequence[str]
) -> tuple[str, ...]:
    """A summary of the table: its samples, their mean length, and what was left out."""
    if manifest is None:
        return ()
    totals = manifest.counts
    mean = totals["completion_tokens"] / max(totals["samples"], 1)
    left = [counted(totals[name], words) for name, words in LEFT_OUT.items() if totals[name]]
    return (
        f"{folder}: {counted(totals['samples'], 'samples')} of "
        f"{counted(totals['prompts'], 'prompts')}, {mean:.1f} tokens each on average",
        counts.text(),
        f"cut at max_new_tokens: {totals['cut']:,}; empty: {totals['empty']:,}",
        *([f"left out: {', '.join(left)}"] if left else []),
        *(f"note: {note}" for note in notes),
        f"next: align judge {folder} --by …",
    )
