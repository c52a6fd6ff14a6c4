"""The work of a command on its output folder: owned, recorded, and kept when it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..schemas.config import TrackingOptions
from ..schemas.errors import Interrupted
from ..stages.storage.disk.locks import Ownable, owner_lock
from ..stages.tracking.journaled_run import Run
from .jobs.recorded_work import recorded_work
from .parts import Part

Manifest = TypeVar("Manifest")


class Tally(Protocol):
    """What a process has done, in numbers."""

    def text(self) -> str:
        """The numbers in a sentence."""
        ...


Counts = TypeVar("Counts", bound=Tally)


class Output(Ownable, Protocol):
    """The folder of a cache or of a table."""

    def prepare(self) -> None:
        """Makes the folder; refuses one that holds something else."""
        ...


def owned(folder: Output, stage: str, part: Part | None) -> AbstractContextManager[object]:
    """Makes the folder, and this process its owner; parts work in it together, without a lock."""
    folder.prepare()
    return nullcontext() if part else owner_lock(folder, stage)


@contextmanager
def working(
    folder: Output,
    stage: str,
    tracking: TrackingOptions,
    part: Part | None,
    *,
    name: str,
    kept: Callable[[], str],
) -> Iterator[Run]:
    """Owns the folder and records the work in it; `kept` says what an interruption leaves.

    What is found finished should be found before: this begins a run with each tracker.
    """
    with (
        owned(folder, stage, part),
        recorded_work(tracking, folder.root, stage, name=name, is_alone=not part) as run,
    ):
        run.set_tags({"align.part": str(part)} if part else {})
        try:
            yield run
        except Interrupted as stop:
            raise Interrupted(stop.signal_number, at=stop.at or f". Kept: {kept()}") from None


@dataclass(frozen=True)
class Made(Generic[Manifest, Counts]):
    """The result of a command: its output, and the work of this process for it."""

    folder: str  # or its location in a bucket
    manifest: Manifest | None  # None while another part is not done
    tally: Counts
    lines: tuple[str, ...]  # a summary of the whole output
    part: Part | None = None
    was_complete: bool = False
    has_published: bool = False  # of several parts, one has

    def text(self) -> str:
        """A summary; of several parts, the one that has published describes the output."""
        if self.manifest and (self.has_published or self.was_complete or not self.part):
            return "\n".join(self.lines)
        rest = (
            "all parts are done"
            if self.manifest
            else "the last part completes it; if one does not end, the same command without --part "
            "does what is missing"
        )
        return f"part {self.part} of {self.folder} is done: {self.tally.text()}\n{rest}"
