"""The work of a command in its output folder: locked, recorded, and kept when interrupted."""

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


class WorkDone(Protocol):
    """The counts of the work that a process has done."""

    def text(self) -> str:
        """The counts in a sentence."""
        ...


Done = TypeVar("Done", bound=WorkDone)


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
    """Locks the folder and records the work in it; `kept` describes the finished work.

    It starts a run with each tracker, so finished output should be detected before.
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
class Made(Generic[Manifest, Done]):
    """The result of a command: its output, and the work of this process."""

    folder: Path | str  # the output, a path or a location in a bucket
    manifest: Manifest | None  # None until all parts are done
    tally: Done
    lines: tuple[str, ...]  # a summary of the whole output
    part: Part | None = None
    was_complete: bool = False
    has_published: bool = False  # true for one of several parts

    def text(self) -> str:
        """A summary; of several parts, only the publishing one describes the output."""
        if self.manifest and (self.has_published or self.was_complete or not self.part):
            return "\n".join(self.lines)
        if not self.part:
            return (
                f"{self.folder} is not finished, because a file is missing: "
                f"{self.tally.text()}\nrun the same command again to make it"
            )
        rest = (
            "all parts are done"
            if self.manifest
            else "the last part completes it; if a part fails, the same command without --part "
            "does the rest"
        )
        return f"part {self.part} of {self.folder} is done: {self.tally.text()}\n{rest}"
