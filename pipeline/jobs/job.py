"""The shape of a command that makes one output, in one process or in parts: look, lock, make.

A job is what is open: all that a person can get wrong is read. `carry_out` looks whether its output
is there, takes the folder, looks again, and only then begins a record and the work. The parts of a
job do the same without the lock; whichever is the last finds all of it made, and publishes.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ...schemas.config import Config
from ...schemas.errors import Interrupted
from ...stages.storage.disk.locks import Ownable, owner_lock
from ...stages.tracking.journaled_run import Run
from ...stages.tracking.progress import Progress
from ..executors.executor import Executor, Tasks
from ..executors.processes import executor_of
from ..parts import Part
from .counts import Counts
from .recorded_work import recorded_work

M = TypeVar("M")  # the manifest: it names a finished output
T = TypeVar("T", bound=Counts)


class Output(Ownable, Protocol):
    """The folder of what a job makes."""

    def prepare(self) -> None:
        """Makes the folder; refuses one that holds something else."""
        ...


class Job(Protocol[M, T]):
    """All that is known before the work; no weights are loaded, and nothing is written."""

    @property
    def stage(self) -> str:
        """The command, by the name that trackers and the lock have for it."""
        ...

    @property
    def run_name(self) -> str:
        """What trackers call the run, unless the user names it."""
        ...

    @property
    def noun(self) -> str:
        """A noun for its output, as sentences use it."""
        ...

    @property
    def config(self) -> Config:
        """The settings of executors and trackers."""
        ...

    @property
    def device(self) -> str:
        """The device it computes on, which decides how an executor works."""
        ...

    @property
    def share(self) -> Part | None:
        """The part of the work that this process does; None: all of it."""
        ...

    @property
    def folder(self) -> Output:
        """The output folder."""
        ...

    @property
    def tally(self) -> T:
        """The counts of this process so far."""
        ...

    def finished(self, *, is_prepared: bool) -> M | None:
        """The output of this very call, if nothing but its writing is left to do.

        It is asked twice: of a folder that is as it was, which it may refuse, and again of one that
        is prepared and, but for a part, locked.
        """
        ...

    def make(self, call: Call[T]) -> M | None:
        """Does the missing work of its share; None if another part is not done."""
        ...

    def lines(self, made: M, *, was_complete: bool) -> list[str]:
        """A summary of a few lines."""
        ...


@dataclass
class Call(Generic[T]):
    """The tools of a running job."""

    run: Run
    progress: Progress
    job: Job[Any, T]
    has_published: bool = False

    @property
    def share(self) -> Part | None:
        """The part of the work that is asked for."""
        return self.job.share

    @property
    def tally(self) -> T:
        """The counts so far."""
        return self.job.tally

    @cached_property
    def executor(self) -> Executor:
        """The executor of the settings; work without tasks needs none."""
        return executor_of(self.job.config.scoring, self.share, self.job.device)

    def work(self, tasks: Tasks[T]) -> None:
        """Has tasks made; what each has counted is recorded as soon as it is there."""
        tally = self.tally
        began = time.perf_counter() - tally.seconds

        def count(done: T) -> None:
            tally.add(done)
            tally.seconds = time.perf_counter() - began
            self.run.log_metrics(tally.metrics(), step=tally.step)

        try:
            self.executor.run(tasks, progress=self.progress, on_done=count)
        except Interrupted as stop:
            raise Interrupted(stop.signal_number, at=f". Kept: {tally.text()}") from None
        tally.seconds = time.perf_counter() - began


@dataclass(frozen=True)
class Made(Generic[M, T]):
    """Result of a job: its output, and the share of this process in it."""

    job: Job[M, T] = field(repr=False)
    manifest: M | None  # None while another part is not done
    was_complete: bool = False
    has_published: bool = False  # of several parts, one has

    @property
    def folder(self) -> Path:
        """The root of the output."""
        return self.job.folder.root

    @property
    def tally(self) -> T:
        """The counts of this process."""
        return self.job.tally

    @property
    def whole(self) -> M:
        """The manifest; only a part may have none."""
        assert self.manifest, "nothing is missing where a process makes all of it"
        return self.manifest

    def text(self) -> str:
        """A summary; of several parts, the one that has published names what is there."""
        share = self.job.share
        if self.manifest and (self.has_published or self.was_complete or not share):
            return "\n".join(self.job.lines(self.manifest, was_complete=self.was_complete))
        rest = (
            f"the {self.job.noun} is complete"
            if self.manifest
            else f"whichever part is the last completes the {self.job.noun}; if one does not end, "
            "the same command without --part does what is missing"
        )
        return f"part {share} of {self.job.folder} is done: {self.tally.text()}\n{rest}"


def carry_out(job: Job[M, T], *, progress: Progress) -> Made[M, T]:
    """Makes the output of a job, or finishes what earlier calls and other parts have left."""
    if found := job.finished(is_prepared=False):
        return Made(job, found, was_complete=True)
    job.folder.prepare()
    is_alone = not job.share
    with owner_lock(job.folder, job.stage) if is_alone else nullcontext():
        if found := job.finished(is_prepared=True):
            return Made(job, found, was_complete=True)
        # Only now: what has nothing to do leaves no empty run with a tracker.
        tracking, home = job.config.tracking, job.folder.root
        with recorded_work(tracking, home, job.stage, name=job.run_name, is_alone=is_alone) as run:
            run.set_tags({"align.part": str(job.share)} if job.share else {})
            call = Call(run, progress, job)
            manifest = job.make(call)
    return Made(job, manifest, has_published=call.has_published)
