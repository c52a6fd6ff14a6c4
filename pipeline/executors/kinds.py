"""The executors that there are, by the names of `scoring.executor`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from ...schemas.config import ScoringOptions
from ...schemas.errors import UsageError
from .executor import WHOLE, Executor, Share
from .processes import Inline


class Kind(Protocol):
    """An executor that works elsewhere, and so makes all tasks."""

    def require(self, options: ScoringOptions) -> None:
        """Refuses what cannot be, by the settings and what is installed; imports nothing heavy."""
        ...

    def of(self, options: ScoringOptions, *, on_gpu: bool) -> Executor:
        """As the options ask."""
        ...


# Each by its file here and its class, which is a Kind.
ELSEWHERE: Mapping[str, tuple[str, str]] = {"ray": ("ray_actors", "RayActors")}


def executor_of(options: ScoringOptions, share: Share | None, device: str) -> Executor:
    """The executor that the options ask for, of what computes on a device."""
    require_executor(options, share)
    if options.executor == "inline":
        return Inline(share or WHOLE)
    return _kind(options.executor).of(options, on_gpu=device == "cuda")


def require_executor(options: ScoringOptions, share: Share | None) -> None:
    """Refuses, by the settings alone, an executor that there cannot be."""
    if options.executor == "inline":
        return
    if share:
        raise UsageError(
            f"--executor {options.executor}: a part, or a rank, makes its share in its own "
            "process. Leave out one of the two."
        )
    _kind(options.executor).require(options)


def _kind(name: str) -> Kind:
    file, kind = ELSEWHERE[name]
    return cast("Kind", getattr(import_module(f".{file}", __package__), kind))
