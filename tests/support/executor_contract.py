"""What every executor keeps to, tried on tasks that leave a file each."""

import os
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from align.pipeline.executors.executor import one_by_one
from align.schemas.errors import AlignError, UsageError
from align.stages.tracking.progress import NoProgress

COUNT = 6
OTHERS = 4  # a task that another process, or a run before, has committed


class Counted(NoProgress):
    """How far a run says that it has come."""

    def __init__(self):
        self.total, self.done = 0, 0

    def begin(self, task, *, total, unit):
        self.total, self.done = total, 0

    def advance(self, done, *, tokens=0, padding=0):
        self.done += done


@dataclass(frozen=True)
class FileTasks:
    """Tasks of unequal cost; the first to be begun is 0."""

    folder: Path
    fails: int = -1
    kills: int = -1  # its process, the first time
    also: int = -1  # what another process commits while any of them is made
    name: str = "files"
    unit: str = "files"
    is_input: bool = False
    sizes: tuple = (1,) * COUNT
    costs: tuple = tuple(range(COUNT, 0, -1))

    def is_committed(self, task):
        return self._file(task).exists()

    def open(self, progress):
        return one_by_one(partial(self._make, progress))

    def _make(self, progress, task):
        if task == self.fails:
            raise UsageError(f"task {task} cannot be made")
        killed = self.folder / "killed"
        if task == self.kills and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.also >= 0:
            self._file(self.also).touch()
        self._file(task).open("x").close()  # a task that is made twice is an error
        progress.advance(self.sizes[task])
        return task

    def _file(self, task):
        return self.folder / str(task)


def made_by(executor, tasks):
    """The facts of what it makes now."""
    done, progress = [], Counted()
    executor.run(tasks, progress=progress, on_done=done.append)
    assert progress.done == progress.total
    return sorted(done)


def require_executor_contract(executor, folder, *, survives=True):
    """What `scoring.executor` names."""
    require_runner_contract(executor, folder / "own", survives=survives)
    prepares = executor.for_preparing(is_small=True, workers=0)
    require_runner_contract(prepares, folder / "prepares", survives=False)


def require_runner_contract(executor, folder, *, survives=True):
    """`survives` is whether a task may kill its process, which is not that of the run."""
    tasks = FileTasks(folder / "all")
    tasks.folder.mkdir(parents=True)
    assert made_by(executor, tasks) == [*range(COUNT)]
    assert made_by(executor, tasks) == []
    known = FileTasks(folder / "known")
    known.folder.mkdir()
    (known.folder / str(OTHERS)).touch()
    assert made_by(executor, known) == [task for task in range(COUNT) if task != OTHERS]
    _require_refusal(executor, FileTasks(folder / "refused", fails=COUNT - 1))
    if survives:
        _require_survival(executor, FileTasks(folder / "killed", kills=1))


def _require_refusal(executor, tasks):
    """A task's own error is that of the run; what was made before it is kept."""
    tasks.folder.mkdir()
    try:
        made_by(executor, tasks)
    except UsageError as error:
        assert str(error) == f"task {COUNT - 1} cannot be made"  # noqa: PT017 - no pytest in actors
    else:
        raise AssertionError("no error")
    kept = {task for task in range(COUNT) if tasks.is_committed(task)}
    assert COUNT - 1 not in kept
    assert made_by(executor, replace(tasks, fails=-1)) == [*sorted({*range(COUNT)} - kept)]


def _require_survival(executor, tasks):
    """A task whose process is lost is made by another, at once or when the run is given again."""
    tasks.folder.mkdir()
    try:
        made_by(executor, tasks)
    except AlignError:
        made_by(executor, tasks)
    assert (tasks.folder / "killed").exists()
    assert all(map(tasks.is_committed, range(COUNT)))
