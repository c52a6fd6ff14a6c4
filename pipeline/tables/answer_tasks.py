"""Tasks whose results are answers: a task is committed once all its answers are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from ...schemas.samples import SERVER
from ...stages.storage.answers import Answers
from ...stages.storage.bucket.objects import Location
from ..executors.executor import WHOLE, Executor, Share

ANSWERS_PER_TASK = 512  # of a local model: several batches, so that few of them are not full


@dataclass(frozen=True)
class AnswerTasks(ABC):
    """Tasks of groups of answers; they travel without what this process has read or loaded."""

    folder: Location  # of the answers

    is_input = False

    def __getstate__(self) -> dict[str, Any]:
        """Another process reads the answers itself."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def answers(self) -> Answers:
        """The answers that this process knows."""
        return Answers(self.folder)

    @abstractmethod
    def missing(self, task: int) -> Collection[Any]:
        """The answers that a group lacks, as far as this process knows."""

    def is_committed(self, task: int) -> bool:
        """Whether a group lacks nothing, whoever answered."""
        if not self.missing(task):
            return True
        self.answers.look()
        return not self.missing(task)


def task_size(
    count: int, answers: int, executor: Executor, share: Share | None, device: str
) -> int:
    """Into tasks of how many things work is cut, of so many with so many answers each."""
    if device == SERVER:  # requests are sent side by side within a task
        return max(1, -(-count // (share or WHOLE).count))
    size = ANSWERS_PER_TASK // answers
    if executor.groups > 1:
        size = min(size, count // executor.groups)
    return max(1, size)
