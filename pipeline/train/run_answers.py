"""Answers to held-out prompts by a run's policy as it began and as it was trained, side by side."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ...schemas.batches import World
from ...schemas.cache import Stops
from ...schemas.config import ModelOptions
from ...schemas.errors import AlignError, UsageError
from ...stages.data.tokenizer import decoder
from ...stages.model.memory.live_memory import is_out_of_memory
from ...stages.report.cache_rows import prompts_of
from ...stages.report.eval_table import read_samples
from ...stages.report.side_by_side import Answered, answers_jsonl
from ...stages.storage.disk import fs
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.disk.locks import owner_lock
from ...stages.storage.run.run_folder import RunFolder
from ...stages.tracking.progress import Progress
from ...stages.train.memory_backoff import release_cached_memory
from ..jobs.tracker_sync import owe_again, own_options, require_no_links, send_again
from ..options.settings import load_settings
from ..tables.samplers import LocalSampler
from .policy_identity import digest_policies
from .resume import Start, require_same_run
from .run_report import require_finished, training_folder, write_report
from .training_job import TrainingJob, open_training


def answer_again(
    root: Path, *, count: int, most_tokens: int, config: Path | None, progress: Progress
) -> Path:
    """Answers prompts for a finished run, whoever trained it.

    Returns the path of its page. Trackers are the user's own, as they are for `mlflow-sync`.
    """
    folder = training_folder(root)
    require_no_links(folder)
    ending = require_finished(folder)
    asked = {"train.answers": count, "train.answer_tokens": most_tokens}
    here = {"train.resume": "auto", "train.output": str(root)}
    settings = load_settings({}, asked | here, file=folder.config)
    own = own_options(root, config)
    with owner_lock(folder, "answers"):
        job = open_training(settings)
        alone = World(rank=0, size=1, local_rank=0)
        job = digest_policies([job], alone, own_digests()).identified(job)
        require_same_run(ending.identity, job)  # its cache and the files of its policy are there
        add_answers(replace(job, config=replace(job.config, tracking=own)), folder, progress)
    return folder.report


def answer_once(job: TrainingJob, start: Start, progress: Progress) -> None:
    """Answers prompts for a run that has just ended, or one that had and has no answers yet."""
    folder = start.folder
    # Of a run that had ended before nobody is the owner.
    with owner_lock(folder, start.run_id) if start.is_finished else nullcontext():
        if not folder.answers.exists():
            add_answers(job, folder, progress)
        elif not _are_shown(folder):  # a kill came between
            _show(job, folder)


def _are_shown(folder: RunFolder) -> bool:
    answers, page = folder.answers, folder.report
    return page.exists() and page.stat().st_mtime_ns >= answers.stat().st_mtime_ns


def _show(job: TrainingJob, folder: RunFolder) -> None:
    write_report(folder.root)
    send_again(folder, job.config.tracking)


def add_answers(job: TrainingJob, folder: RunFolder, progress: Progress) -> None:
    """Writes the answers and the report with them, and sends both on; for the folder's owner."""
    train = job.config.train
    before = _sampler(job, _began_as(job))
    prompts = _prompts(job, folder, before.context)
    progress.say(
        f"{len(prompts)} held-out prompts are answered by the policy as it began and as it was "
        f"trained, with {train.answer_tokens:,} tokens at most"
    )
    sides = [
        _answers(sampler, [*prompts.values()], train.answer_tokens)
        for sampler in (before, _sampler(job, _trained_as(job, folder)))
    ]
    decode = decoder(job.policy.path, Stops.of(job.manifest.fingerprint).tokens)
    answered = [
        Answered(
            row_id=row_id,
            prompt=decode(ids, False),
            before=first[0],
            after=second[0],
            before_ended=first[1],
            after_ended=second[1],
        )
        for (row_id, ids), first, second in zip(prompts.items(), *sides, strict=True)
    ]
    owe_again(folder, folder.pages)
    fs.publish(folder.answers, answers_jsonl(answered))
    _show(job, folder)


def _began_as(job: TrainingJob) -> ModelOptions:
    return replace(job.policy, dtype=job.config.train.dtype)


def _trained_as(job: TrainingJob, folder: RunFolder) -> ModelOptions:
    began, trained = _began_as(job), str(folder.model)
    if job.config.lora.enabled:
        return replace(began, adapter=trained)
    return replace(began, path=trained, adapter="")


def _sampler(job: TrainingJob, model: ModelOptions) -> LocalSampler:
    return LocalSampler(model, job.config.tokens, job.config.scoring.tokens_per_batch)


def _prompts(job: TrainingJob, folder: RunFolder, context: int | None) -> dict[str, list[int]]:
    """The first held-out prompts with room for an answer, each once, by the id of a row."""
    train, tables = job.config.train, folder.evaluations()
    if not tables:
        raise UsageError(
            f"{folder.root} has written down no held-out row that could be answered. Train with "
            "--eval-fraction or train.eval_cache, and with train.eval_table above 0."
        )
    ids = list(dict.fromkeys(read_samples(tables[min(tables)])["row_id"]))
    cache, manifest = job.held_out or (job.cache, job.manifest)
    found = prompts_of(cache, manifest, ids)
    wanted: dict[tuple[int, ...], str] = {}
    for row_id in filter(found.__contains__, ids):
        prompt = tuple(found[row_id].tolist())
        if context is None or len(prompt) + train.answer_tokens <= context:
            wanted.setdefault(prompt, row_id)
    if not found:
        raise UsageError(f"{cache.root} has none of the held-out rows of {folder.root}.")
    if not wanted:
        raise UsageError(
            f"No held-out prompt leaves room for {train.answer_tokens:,} tokens: the model takes "
            f"{context or 0:,} in all. Lower train.answer_tokens."
        )
    return {row_id: [*prompt] for prompt, row_id in [*wanted.items()][: train.answers]}


def _answers(
    sampler: LocalSampler, prompts: Sequence[Sequence[int]], most: int
) -> list[tuple[str, bool]]:
    """The answers of one of the models, once nothing else holds memory."""
    gc.collect()
    release_cached_memory()
    try:
        return sampler.likeliest(prompts, most)
    except AlignError:
        raise
    except Exception as error:  # a model's code may raise anything, and the training has ended well
        lack = "there is no memory for it" if is_out_of_memory(error) else repr(error)
        raise UsageError(f"{sampler.model.path} gives no answers: {lack}.") from error
