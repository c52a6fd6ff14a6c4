"""`align sample`: reads prompts, draws the missing samples, and writes the table of all samples."""

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
    Distribution,
    Prompt,
    Refused,
    Sample,
    Sampler,
    SampleRequest,
    Sampling,
    sample_key,
)
from ...stages.data.cells import template_unused
from ...stages.data.files import inputs_of
from ...stages.data.text_rows import read_prompts
from ...stages.sample.sample_table import sample_table, unique_prompts
from ...stages.storage.answers import Answers
from ...stages.storage.cache import Cache
from ...stages.storage.locations import origin_of
from ...stages.storage.tables import TableFolder, TableManifest
from ...stages.tracking.progress import Progress
from ...stages.tracking.run_texts import data_name, description, model_name, quoted, run_name
from ..jobs.object_inputs import with_local_data
from ..jobs.rejected_rows import RejectedRows, first_rejected
from ..parts import Part
from ..work import CommandResult, owned, working
from .samplers import (
    ANSWERS_AT_ONCE,
    missing_groups,
    require_local_answers,
    require_sampled_model,
    sampler_of,
    sampling_of,
    wrapping_of,
)

SampleResult: TypeAlias = "CommandResult[TableManifest, SampleCounts]"

# Counts of a table of samples, with their words.
LEFT_OUT = {
    "prompts_too_long": "prompts longer than the context allows",
    "prompts_refused": "prompts that the model refuses",
    "rows_that_repeat_a_prompt": "rows that repeat a prompt",
    "rows_that_cannot_be_used": "unusable rows",
}


def sample(
    config: Config,
    *,
    progress: Progress,
    part: Part | None = None,
    sampler: Sampler | None = None,
) -> SampleResult:
    """Makes the table of samples; stored samples are not drawn again.

    A part draws its own samples, and makes the table if no sample is missing afterwards. `sampler`
    replaces the model of the settings.
    """
    # Check the settings before reading data or a model.
    options, counts = config.sample, SampleCounts()
    require_local_answers(part, options.output, options.answers, "sample.answers")
    if config.model.adapter and not config.server.url:
        from ...stages.model.model_folder import require_peft  # noqa: PLC0415 - not for servers

        require_peft()
    if sampler is None:
        require_sampled_model(config)

    # Read the distinct prompts, and find the stored samples of them.
    config = with_local_data(config)
    sampler = sampler or sampler_of(config)
    prompts, left_out, notes = _read_prompts(config, sampler)
    folder = TableFolder.at(options.output, "samples")
    sampling, identity = sampling_of(options), dict(sampler.identity())
    numbers = {**asdict(sampling), "n": options.n}
    settings = {**numbers, "model": identity}
    keys = {
        prompt: [sample_key(prompt, number, sampling, identity) for number in range(options.n)]
        for prompt in prompts
    }
    answers = Answers(folder.answers(options.answers))
    counts.known = sum(len(own) - len(answers.missing(own)) for own in keys.values())
    if counts.known == options.n * len(prompts):
        with owned(folder, "sample", part):
            manifest = _publish(folder, prompts, left_out, keys, answers, settings)
        lines = _lines(folder, manifest, counts, notes)
        return CommandResult(str(folder), manifest, counts, lines, part, was_complete=True)

    model = config.server.model if config.server.url else config.model.path
    name = run_name(model, "sample", data_name(config.data.files))
    with working(folder, "sample", config.tracking, part, name=name, kept=counts.text) as run:
        params = {f"sample.{name}": str(value) for name, value in numbers.items()}
        run.log_params({**params, **identity})
        files = ", ".join(map(origin_of, config.data.files))
        run.set_tags({"align.samples": str(folder), "align.model_key": digest(identity)})
        sentence = (
            f"{options.n} answers of {quoted(model_name(model))} to each of "
            f"{counted(len(prompts), 'prompts')}."
        )
        facts = {"table": folder, "model": model, "prompts": files, **params}
        run.describe(description(sentence, facts))
        run.log_dataset("prompts", digest=digest([*prompts]), source=files, context="sampling")

        # Sorted by length, so that a batch needs little padding.
        own = sorted(prompts.values(), key=lambda one: (len(str(one.text)), one.key))
        own = own[part.number - 1 :: part.count] if part else own
        progress.begin("sampling", total=options.n * len(own), unit="samples")
        logged = 0
        for group in _draw(own, keys, answers, sampler, sampling, progress):
            counts.add(group)
            if counts.new >= logged + ANSWERS_AT_ONCE:
                logged = counts.new
                run.log_metrics(counts.metrics(), step=logged)
        run.log_metrics(counts.metrics(), step=counts.new)
        progress.end()

        answers.look()
        manifest = _publish(folder, prompts, left_out, keys, answers, settings)
        if manifest:
            totals = {f"table/{name}": float(count) for name, count in manifest.counts.items()}
            run.log_metrics(totals, step=counts.new)
            run.set_tags({"align.samples_root": manifest.root})
    lines = _lines(folder, manifest, counts, notes)
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
    """Draws the missing samples of prompts; each group is durable before the next is requested."""
    opened = None
    sample_of_key = {key: (one, n) for one in prompts for n, key in enumerate(keys[one.key])}
    for missing in missing_groups(answers, [*sample_of_key], sampler=sampler, progress=progress):
        numbers: dict[str, tuple[Prompt, list[int]]] = {}
        for key in missing:
            prompt, number = sample_of_key[key]
            numbers.setdefault(prompt.key, (prompt, []))[1].append(number)
        requests = [SampleRequest(prompt, tuple(own)) for prompt, own in numbers.values()]
        opened = opened or sampler.open(sampling)
        for group in opened.sample(requests):
            drawn: dict[str, dict[str, Any]] = {}
            refused: dict[str, str] = {}
            tokens = 0
            for one in group:
                key = keys[one.prompt][one.number]
                if isinstance(one, Refused):
                    refused[key] = one.reason
                else:
                    drawn[key] = asdict(one)
                    tokens += one.completion_tokens
            answers.add(drawn, refused)
            progress.advance(len(group), tokens=tokens)
            yield group


@dataclass
class SampleCounts:
    """Counts of the samples of this process."""

    new: int = 0  # drawn by this process
    completion_tokens: int = 0  # of the new ones
    known: int = 0  # cached before
    refused: set[str] = field(default_factory=set)  # keys of prompts
    started: float = field(default_factory=time.perf_counter)

    def add(self, group: Sequence[Sample | Refused]) -> None:
        """Counts a group of samples."""
        for one in group:
            if isinstance(one, Refused):
                self.refused.add(one.prompt)
            else:
                self.new += 1
                self.completion_tokens += one.completion_tokens

    def metrics(self) -> dict[str, float]:
        """The counts by metric name."""
        seconds = time.perf_counter() - self.started  # includes reading the prompts
        return {
            "samples/new": float(self.new),
            "samples/refused_prompts": float(len(self.refused)),
            "tokens": float(self.completion_tokens),
            "tokens_per_second": self.completion_tokens / max(seconds, 1e-9),
        }

    def text(self) -> str:
        """The counts of new and cached samples, and the time."""
        seconds = time.perf_counter() - self.started
        new = counted(self.new, "samples")
        return f"{new} drawn now, {self.known:,} cached before, in {seconds:.1f} s"


def _read_prompts(
    config: Config, sampler: Sampler
) -> tuple[Mapping[str, Prompt], Mapping[str, int], Sequence[str]]:
    """Reads the prompts; refuses data with too many unusable rows.

    Returns the distinct prompts by key in the order of the data, counts of what is left out, and
    notes for the summary.
    """
    for name in config.data.files:
        cache = Cache(Path(name))
        if cache.manifest_file.is_file() and cache.data.is_dir():
            made_from = ", ".join(entry.name for entry in cache.manifest().inputs)
            raise UsageError(
                f"{name} is a cache, which has no text of prompts before the chat template. Name "
                f"the data that it was made from: {made_from}."
            )
    inputs = inputs_of(config.data)
    rows = read_prompts(inputs, config.data.map, wrapping_of(config))
    prompts = unique_prompts(map(sampler.normalized, rows.prompts))

    # A prompt that is too long is left out; one that the model cannot complete is a bad row.
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

    notes = [
        f"column {name!r} is left out, because the table has a column of that name"
        for name in rows.not_carried
    ]
    texts = sum(isinstance(prompt.text, str) for prompt in prompts.values())
    if texts and config.data.wrap == "auto" and sampler.has_template:
        notes.append(template_unused(texts, "prompts"))
    return prompts, left_out, notes


def _publish(
    folder: TableFolder,
    prompts: Mapping[str, Prompt],
    left_out: Mapping[str, int],
    keys: Mapping[str, Sequence[str]],
    answers: Answers,
    settings: Mapping[str, Any],
) -> TableManifest | None:
    """Writes the table of all prompts that are not refused; None while samples are missing."""
    reasons = answers.refused(key for own in keys.values() for key in own)
    answered = {
        key: prompt for key, prompt in prompts.items() if reasons.keys().isdisjoint(keys[key])
    }
    num_refused = len(prompts) - len(answered)
    if num_refused:
        first = next(iter(reasons.values()))
        refusal = f"The model refuses {num_refused:,} of {counted(len(prompts), 'prompts')}"
        if not answered:
            raise UsageError(f"{refusal}: {first}. Change the setting, or use another model.")
        logger.warning("%s. The reason for the first: %s", refusal, first)
    own = [key for prompt in answered for key in keys[prompt]]
    if answers.missing(own):
        return None
    stored = dict(answers.of(own))
    samples = [Sample(**stored[key]) for key in own]
    return folder.publish(
        sample_table(answered, samples),
        made_from={"prompts": digest([*answered]), "model": digest(settings["model"])},
        settings=settings,
        counts={
            **left_out,
            "prompts": len(answered),
            "prompts_refused": num_refused,
            "samples": len(samples),
            "cut": sum(one.finish == "length" for one in samples),
            "empty": sum(not one.text.strip() for one in samples),
            "prompt_tokens": sum(one.prompt_tokens for one in samples if one.number == 0),
            "completion_tokens": sum(one.completion_tokens for one in samples),
        },
        sampling=Distribution(settings["temperature"], settings["top_p"], settings["top_k"]),
    )


def _lines(
    folder: TableFolder, manifest: TableManifest | None, counts: SampleCounts, notes: Sequence[str]
) -> tuple[str, ...]:
    """The summary for the terminal: samples, their mean length, and what is left out."""
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
