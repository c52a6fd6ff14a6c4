"""Runs a command's work in its output folder: locked, tracked, and kept when interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ..schemas.config import TrackingOptions
from ..schemas.errors import Interrupted
from ..stages.storage.disk.locks import owner_lock
from ..stages.tracking.run import Run, recorded
from .parts import Part

if TYPE_CHECKING:
    from ..stages.storage.cache_work import CacheWork
    from ..stages.storage.tables import TableFolder

Manifest = TypeVar("Manifest")


class WorkCounts(Protocol):
    """Counts of the work that this process has done."""

    def text(self) -> str:
        """The counts in a sentence."""
        ...


Counts = TypeVar("Counts", bound=WorkCounts)


def owned(
    folder: CacheWork | TableFolder, stage: str, part: Part | None
) -> AbstractContextManager[object]:
    """Makes and locks the folder; parts work in it together, without a lock."""
    folder.prepare()
    return nullcontext() if part else owner_lock(folder.root, stage)


@contextmanager
def working(
    folder: CacheWork | TableFolder,
    stage: str,
    tracking: TrackingOptions,
    part: Part | None,
    *,
    name: str,
    kept: Callable[[], str],
) -> Iterator[Run]:
    """Locks the folder and tracks the work in it; `kept` describes the finished work.

    It starts a run in each tracker, so callers return finished output before.
    """
    with (
        owned(folder, stage, part),
        recorded(tracking, folder.root, stage, name=name, is_alone=not part) as run,
    ):
        run.set_tags({"align.part": str(part)} if part else {})
        try:
            yield run
        except Interrupted as stop:
            raise Interrupted(stop.signal_number, at=stop.at or f". Kept: {kept()}") from None


@dataclass(frozen=True)
class CommandResult(Generic[Manifest, Counts]):
    """The result of a command: its output, and counts of this process's work."""

    folder: Path | str  # the output, a path or a location in a bucket
    manifest: Manifest | None  # None until all parts are done
    counts: Counts
    lines: tuple[str, ...]  # a summary of the whole output
    part: Part | None = None
    was_complete: bool = False
    has_published: bool = False  # at most one of several parts does

    def text(self) -> str:
        """A summary; of several parts, only the one that publishes the output describes it."""
        if self.manifest and (self.has_published or self.was_complete or not self.part):
            return "\n".join(self.lines)
        if not self.part:
            return (
                f"{self.folder} is not finished, because a file is missing: "
                f"{self.counts.text()}\nrun the same command again to make it"
            )
        rest = (
            "all parts are done"
            if self.manifest
            else "the last part completes it; if a part fails, the same command without --part "
            "does the rest"
        )
        return f"part {self.part} of {self.folder} is done: {self.counts.text()}\n{rest}"
