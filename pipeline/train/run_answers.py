"""`align report RUN --answers N`: held-out prompts, answered before training and after it."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import polars as pl
import torch

from ...schemas.batches import World
from ...schemas.cache import StopTokens
from ...schemas.errors import AlignError, UsageError
from ...stages.data.tokenizer import decoder
from ...stages.model.library_errors import is_out_of_memory
from ...stages.report.cache_rows import prompts_of
from ...stages.report.eval_table import ANSWERS, by_set, read_samples
from ...stages.storage.disk import fs
from ...stages.storage.disk.locks import owner_lock
from ...stages.tracking.progress import Progress
from ..jobs.tracker_sync import own_options, send_files
from ..options.settings import load_settings
from ..tables.samplers import LocalSampler
from .load import identify
from .resume import require_same_run
from .run_report import require_finished, training_folder, write_report
from .setup import Run, check


def answer_again(
    root: Path, *, count: int, most_tokens: int, config: Path | None, progress: Progress
) -> Path:
    """Answers prompts with a finished run's policy and model; returns the path of the report.

    Trackers come from the current user's settings, as for `mlflow-sync`.
    """
    folder = training_folder(root)
    ending = require_finished(folder)
    here = {"train.resume": "auto", "train.output": str(root)}
    settings = load_settings({}, here, file=folder.config)
    tracking = own_options(config)
    with owner_lock(folder.root, "answers"):
        run = check(settings)
        if run.objective.head == "score":
            raise UsageError(
                f"--answers: {run.objective.name} trains a reward model, which cannot generate "
                "text. Choose another run."
            )
        identify(run, World(rank=0, size=1, local_rank=0))
        require_same_run(ending.identity, run)  # its cache and policy must be unchanged

        began = replace(run.begins_as, dtype=run.config.train.dtype)
        trained = replace(began, path=str(folder.model), adapter="")
        if run.config.lora.enabled:
            trained = replace(began, adapter=str(folder.model))
        tokens, budget = run.config.tokens, run.config.scoring.tokens_per_batch
        samplers = [LocalSampler(model, tokens, budget) for model in (began, trained)]
        prompts = _prompts(run, samplers[0].context, count, most_tokens)
        progress.log(
            f"the policy answers {len(prompts)} held-out prompts, before and after training, with "
            f"at most {most_tokens:,} tokens"
        )
        answers: dict[str, list[str] | list[bool]] = {"row_id": [*prompts]}
        decode = decoder(run.begins_as.path, StopTokens.of(run.manifest.fingerprint).tokens)
        answers["prompt"] = [decode(ids, False) for ids in prompts.values()]
        # One model after the other, because two may not fit into memory.
        for when, sampler in zip(("before", "after"), samplers, strict=True):
            gc.collect()
            torch.cuda.empty_cache()
            try:
                found = sampler.greedy_answers([*prompts.values()], most_tokens)
            except AlignError:
                raise
            except Exception as error:  # a model's code may raise anything
                reason = "memory ran out" if is_out_of_memory(error) else repr(error)
                raise UsageError(f"{sampler.model.path} cannot answer: {reason}.") from error
            answers[when] = [text for text, _ in found]
            answers[f"{when}_ended"] = [ended for _, ended in found]
        fs.publish(folder.answers, pl.DataFrame(answers, ANSWERS).write_ndjson().encode())
        write_report(folder.root)
        send_files(folder, folder.pages, tracking)
    return folder.report


def _prompts(run: Run, context: int | None, count: int, most_tokens: int) -> dict[str, list[int]]:
    """The first held-out prompts with room for an answer, without duplicates, by row id."""
    tables = run.folder.evaluations()
    if not tables:
        raise UsageError(
            f"{run.folder.root} has no table of held-out rows. Train with --eval-fraction or "
            "train.eval_cache, and with train.eval_table above 0."
        )
    name, samples = next(iter(by_set(read_samples(tables[min(tables)])).items()))
    ids = samples["row_id"].unique(maintain_order=True).to_list()
    cache, manifest = run.held_out.get(name) or (run.cache, run.manifest)
    found = prompts_of(cache, manifest, ids)
    if not found:
        raise UsageError(f"{cache.root} has none of the held-out rows of {run.folder.root}.")
    fitting: dict[tuple[int, ...], str] = {}
    for row_id in filter(found.__contains__, ids):
        prompt = tuple(found[row_id].tolist())
        if context is None or len(prompt) + most_tokens <= context:
            fitting.setdefault(prompt, row_id)
    if not fitting:
        raise UsageError(
            f"No held-out prompt leaves room for {most_tokens:,} tokens in the model's context of "
            f"{context or 0:,} tokens. Lower --answer-tokens."
        )
    return {row_id: [*prompt] for prompt, row_id in [*fitting.items()][:count]}
