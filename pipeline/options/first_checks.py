"""What a command refuses within a second: before torch, which takes seconds, is imported."""

from __future__ import annotations

from pathlib import Path

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...stages.methods.objective import Objective
from ...stages.methods.table import objective_of
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
    """Refuses a training whose method, cache or policy there is not."""
    asked_objective(config)
    cache = config.train.cache or config.cache.output
    if not is_remote(cache) and not (Path(cache) / "manifest.json").exists():
        Cache(Path(cache)).manifest()  # which says what there is instead
    require_folder(config.train.model, "Pass the policy by --model DIR.")


def require_inputs(config: Config) -> None:
    """Refuses data and a reference that are not there.

    With Ray they may lie on its machines alone; without a model its own refusal comes first.
    """
    if config.scoring.executor != "inline" or not config.model.path:
        return
    for name in config.data.files:
        if not is_remote(name) and not Path(name).exists():
            raise UsageError(f"{name}: no such file or folder. Check the path.")
    if config.data.files:
        require_folder(config.model.path, "Pass --model DIR, or set ALIGN_MODEL.")


def require_folder(model: str, way: str) -> None:
    """Refuses a model whose folder is not there."""
    if model and not is_remote(model) and not Path(model).is_dir():
        raise UsageError(f"{model}: no such model folder. {way}")
