"""Checks that a command makes within a second, before torch is imported."""

from __future__ import annotations

from pathlib import Path

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...stages.methods.objective import Objective
from ...stages.methods.table import objective_of
from ...stages.model.model_folder import CONFIG, require_folder
from ...stages.storage.cache import Cache
from ...stages.storage.locations import is_remote


def asked_objective(config: Config) -> Objective:
    """The method of the settings with its options, or a mixture."""
    if not config.train.method:
        raise UsageError(
            "No method. Pass --method kto (or dpo, orpo, …; `align methods` lists them all), or "
            "set train.method in align.yaml."
        )
    return objective_of(config.train.method, config.method)


def require_training(config: Config) -> None:
    """Refuses a training without a method, cache or policy."""
    asked_objective(config)
    cache = config.train.cache or config.cache.output
    if not is_remote(cache) and not (Path(cache) / "manifest.json").exists():
        Cache(Path(cache)).manifest()  # raises if there is none
    require_model(config.train.model, "Pass the policy with --model DIR.")


def require_inputs(config: Config) -> None:
    """Refuses missing data and a missing reference.

    With Ray, they may be on its machines only. Without a model, a later check gives the error.
    """
    if config.scoring.executor != "inline" or not config.model.path:
        return
    for name in config.data.files:
        if not is_remote(name) and not Path(name).exists():
            raise UsageError(f"{name}: no such file or folder. Check the path.")
    if config.data.files:
        require_model(config.model.path, "Pass --model DIR, or set ALIGN_MODEL.")


def require_model(model: str, advice: str) -> None:
    """Refuses a model whose folder is missing or has no config.json."""
    if model and not is_remote(model):
        require_folder(model, advice, having=(CONFIG,))
