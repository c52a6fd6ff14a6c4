"""Which runs a sweep is made of: their settings, and the folders that tell them apart."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..schemas.errors import UsageError
from ..stages.methods.table import recipe_of
from .settings import parse_varied

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# What a sweep sets in every run, and how it is told.
OWN = {"train.method": "--method", "train.output": "--output"}


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its name, and the settings that tell it from the others."""

    name: str  # of its folder as well
    settings: tuple[str, ...]  # NAME=VALUE, as --set takes them


def varied_by(texts: Sequence[str]) -> dict[str, list[str]]:
    """What --vary asks for; a setting that stands twice is refused, and so are a sweep's own."""
    names = [text.partition("=")[0] for text in texts]
    for name in names:
        if name in OWN:
            raise UsageError(f"--vary {name}: a sweep sets it itself. Use {OWN[name]}.")
        if names.count(name) > 1:
            raise UsageError(f"{name} is varied twice. Give all of its values at once.")
    return parse_varied(texts)


def trials_of(methods: Sequence[str], varied: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Every combination; an option that a method does not have is left out for it."""
    recipes = [recipe_of(name, {}) for name in methods]
    for key in varied:
        section, _, option = key.partition(".")
        if section == "method" and not any(option in recipe.option_names for recipe in recipes):
            raise UsageError(f"{key}: none of {', '.join(methods)} has it. See `align methods`.")
    trials = []
    for method, recipe in zip(methods, recipes, strict=True):
        own = {
            key: values
            for key, values in varied.items()
            if not key.startswith("method.") or key.removeprefix("method.") in recipe.option_names
        }
        for values in itertools.product(*own.values()):
            chosen = [f"{key}={value}" for key, value in zip(own, values, strict=True)]
            name = "-".join(map(_in_a_folder_name, (recipe.name, *values)))
            trials.append(Trial(name, (f"train.method={method}", *chosen)))
    _require_own_names(trials)
    return trials


def values_of(trials: Iterable[Trial]) -> dict[str, list[str]]:
    """Every setting that the trials make, and its values in their order."""
    found: dict[str, dict[str, None]] = {}
    for trial in trials:
        for text in trial.settings:
            name, _, value = text.partition("=")
            found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def _in_a_folder_name(text: str) -> str:
    return re.sub(r"[^\w.+-]", "_", text)


def _require_own_names(trials: Iterable[Trial]) -> None:
    """Refuses two runs in one folder; some disks do not tell capital letters from small ones."""
    known: dict[str, Trial] = {}
    for trial in trials:
        other = known.setdefault(trial.name.casefold(), trial)
        if other is not trial:
            raise UsageError(
                f"{' '.join(other.settings)} and {' '.join(trial.settings)} would both be the "
                f"run {trial.name}. Leave one of them out."
            )
