"""Every check of the settings of rounds, before the first sample."""

from __future__ import annotations

import os
from dataclasses import replace

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...stages.methods.recipe import Recipe
from ...stages.model.model_folder import require_peft
from ...stages.storage.locations import require_on_disk
from ...stages.storage.run.rounds_folder import RoundsFolder
from ..jobs.object_inputs import local_model, with_local_inputs
from ..options.first_checks import asked_recipe
from ..options.settings import Settings, as_absolute
from ..plan.cache_checks import require_own_samples
from ..precompute.opening import require_model
from ..tables.judges import KINDS, NAMES, kind_of
from ..tables.samplers import sampling_of
from .round_prompts import split_prompts
from .rounds_plan import RoundsJob

REFUSED_IN_FILES = ("train.model", "judge.against")


def open_rounds(settings: Settings) -> RoundsJob:
    """Checks everything that a user can get wrong before any slow work."""
    config = settings.config
    require_model(config)
    _require_alone()
    _require_free(settings)
    recipe = _recipe(config)
    _require_judge(config)
    _require_lora(config)
    _require_evaluation(config)
    folder = RoundsFolder(require_on_disk(config.rounds.output, "rounds are"))
    local = with_local_inputs(config)
    judge = replace(local.judge, model=local_model(local.judge.model))
    local = replace(local, judge=judge)
    job = RoundsJob(settings, local, folder, recipe, split_prompts(local))
    _require_measured(job)
    job.made_from(1, None)  # a model, a template or a function that is missing is found now
    _ = job.judge_sampler  # and so is a judge without a model, or a server without a revision
    return job


def _require_alone() -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            "align rounds works in one process. Start it without a launcher; on several ranks "
            "give the verbs one by one: sample, judge, select, precompute-ref, train."
        )


def _require_free(settings: Settings) -> None:
    """Refuses settings that every round would override."""
    config = as_absolute(settings.config)
    for name in REFUSED_IN_FILES:
        if config[name]:
            raise UsageError(
                f"{settings.origins.get(name, name)}: {name}: the rounds set it themselves. "
                "Leave it out."
            )
    if config["train.eval_cache"]:
        raise UsageError(
            "train.eval_cache: each round has a cache of its own. Hold prompts out by "
            "rounds.eval_fraction."
        )
    if 0 < config["train.eval_fraction"] <= config["rounds.eval_fraction"]:
        raise UsageError(
            f"train.eval_fraction is {config['train.eval_fraction']}: by the same hash the rounds "
            f"hold out {config['rounds.eval_fraction']} of the prompts already, so it would hold "
            "out nothing. Set it to 0, or above rounds.eval_fraction."
        )


def _recipe(config: Config) -> Recipe:
    train, select = config.train, config.select
    recipe = asked_recipe(config)
    is_meant = train.other_sampling
    drawn = sampling_of(config.sample).drawing
    require_own_samples(recipe, "the rounds", [drawn], may_differ=is_meant)
    if recipe.head == "score":
        raise UsageError(f"{recipe.name} makes a reward model, which writes no samples.")
    if recipe.rows == "paired" and select.rows == "labels":
        raise UsageError(
            f"{recipe.name} learns from pairs, and select.rows is labels. Set it to best_worst."
        )
    if "mismatched" in recipe.needs and not config.cache.kl_pairs:
        raise UsageError(f"{recipe.name} needs mismatched completions. Set cache.kl_pairs to 1.")
    if "reference" in recipe.needs and not config.cache.scored:
        raise UsageError(
            f"{recipe.name} needs the reference's log-probs. Set cache.scored to true."
        )
    if "token_reference" in recipe.needs and not config.cache.token_logps:
        raise UsageError(
            f"{recipe.name} with these options needs the reference's log-prob of every token. Set "
            "cache.token_logps to true."
        )
    return recipe


def _require_judge(config: Config) -> None:
    if config.judge.by not in KINDS:
        raise UsageError(f"No judge. Set judge.by: {NAMES}.")
    kind = kind_of(config.judge)
    if config.server.url and not kind.asks:
        raise UsageError(
            f"server.url is set, and judge.by is {config.judge.by}: in rounds a server can only be "
            "the judge, because it does not have the policy. Leave it out."
        )
    kind.require(config, has_sampler=False)


def _require_lora(config: Config) -> None:
    if not config.lora.enabled:
        return
    require_peft()
    if config.model.adapter:
        raise UsageError(
            "model.adapter and lora.enabled: a new adapter on top of another one could not be "
            "loaded by others. Merge the adapter into the model first, and set model.path to that."
        )


def _require_evaluation(config: Config) -> None:
    rounds = config.rounds
    if rounds.eval_n > 1 and not rounds.eval_temperature:
        raise UsageError(
            f"rounds.eval_n is {rounds.eval_n} at rounds.eval_temperature 0, where all samples of "
            "a prompt are the same. Set eval_n to 1, or a temperature."
        )


def _require_measured(job: RoundsJob) -> None:
    rounds = job.config.rounds
    if not job.split.train:
        raise UsageError(
            f"All {len(job.split.held_out)} prompts are held out. Lower rounds.eval_fraction, or "
            "add prompts."
        )
    if not job.split.held_out and (rounds.min_win_rate or rounds.max_length_growth):
        raise UsageError(
            "rounds.min_win_rate and rounds.max_length_growth are measured on held-out prompts, "
            "and none is held out. Raise rounds.eval_fraction, or set both to 0."
        )
