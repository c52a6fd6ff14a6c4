"""A run that records nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ...schemas.tracking import Status


class NullRun:
    """Takes everything a `Run` takes and keeps none of it."""

    run_id = ""
    run_key = ""

    def log_params(self, params: Mapping[str, str]) -> None:
        """Keeps nothing."""

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Keeps nothing."""

    def log_dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """Keeps nothing."""

    def log_artifact(self, path: Path) -> None:
        """Keeps nothing."""

    def log_model_link(self, folder: Path, *, tags: Mapping[str, str]) -> None:
        """Keeps nothing."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Keeps nothing."""

    def sync(self) -> None:
        """Does nothing."""

    def finish(self, status: Status) -> None:
        """Does nothing."""
