"""What names a run: its settings and the libraries it computes with."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from ..schemas.codec import digest
from .settings import flatten

if TYPE_CHECKING:
    from ..schemas.config import Config

PACKAGES = ("torch", "transformers", "deepspeed")


def versions() -> dict[str, str]:
    """Of the libraries that compute."""
    return {package: version(package) for package in PACKAGES}


def config_digest(config: Config) -> str:
    """Everything the run was told, in one name."""
    return digest({name: str(value) for name, value in flatten(config).items()})
