"""Both stages in one process: the reference scores the data, then the policy is trained."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import torch

from ...schemas.errors import AlignError, UsageError
from ...stages.engine.launchers import world_apart
from ...stages.storage.run.run_folder import run_folder_of
from ...stages.tracking.progress import Progress
from ..jobs.object_inputs import local_model
from ..options.settings import Settings
from ..plan.setting_checks import with_adapters_settings
from ..precompute.opening import require_model
from .run_report import Trained
from .setup import check, check_settings
from .train import train as run_training


def settings_of_both(given: Settings) -> Settings:
    """The settings of both stages; checks now what stage 2 would refuse only after stage 1."""
    config, train = given.config, given.config.train
    if world_apart(os.environ).size > 1:
        raise UsageError(
            "`align run` needs a single process. On several ranks, run `align precompute-ref` and "
            "then `align train`."
        )
    if train.cache not in {"", config.cache.output}:
        raise UsageError(
            f"{given.origins['train.cache']}: train.cache is {train.cache}, but `align run` trains "
            f"on the cache that it makes, {config.cache.output}. Leave train.cache out."
        )
    require_model(config)
    objective = check_settings(given)
    needs = objective.needs
    adapter = "" if train.model else local_model(config.model.adapter)
    with_adapters_settings(given, objective, adapter)
    if "reference" in needs and not config.cache.scored:
        raise UsageError(
            f"{train.method} needs the reference's log-probs. Set cache.scored to true."
        )
    if "token_reference" in needs and not config.cache.token_logps:
        raise UsageError(
            f"{train.method} needs the reference's log-prob of every token. Add --token-logps."
        )
    if "mismatched" in needs and not config.cache.kl_pairs:
        raise UsageError(
            f"{train.method} needs KL completions, but cache.kl_pairs is 0. Pass --kl-pairs 1."
        )
    if train.resume == "never":
        run_folder_of(train.output).require_new()
    # A policy named beside the reference may be another model.
    policy = replace(
        train, cache=config.cache.output, other_reference=train.other_reference or bool(train.model)
    )
    return replace(given, config=replace(config, train=policy))


def train_on_cache(settings: Settings, *, progress: Progress) -> Trained:
    """Trains the policy on the cache; an error message adds that the cache is finished."""
    gc.collect()  # frees the reference
    torch.cuda.empty_cache()
    try:
        return run_training(check(settings), progress=progress)
    except AlignError as error:
        cache = settings.config.train.cache
        message = f"{error}\nThe cache in {cache} is finished: `align run` will reuse it."
        raise type(error)(message) from error
