"""Tasks whose results are answers: a task is committed once all its answers are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...schemas.samples import SERVER
from ...stages.storage.answers import Answers
from ...stages.storage.locations import is_remote
from ..executors.executor import WHOLE, Share

ANSWERS_PER_TASK = 512  # of a local model: several batches, so that few of them are not full
TASKS_PER_PART = 4  # so that the last of one does not keep all waiting


@dataclass(frozen=True)
class AnswerTasks(ABC):
    """Tasks of groups of answers."""

    folder: Path  # of the answers

    is_input = False

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


def in_this_process(config: Config) -> Config:
    """The settings without the executor of stage 1, which samples and judgments do not have."""
    return replace(config, scoring=replace(config.scoring, executor="inline"))


def require_kept(share: Share | None, output: str, answers: str, setting: str) -> None:
    """Refuses answers in a store, and a part whose answers no other machine would see."""
    if is_remote(answers) or (share and is_remote(output) and not answers):
        raise UsageError(
            f"{setting}: answers are kept on a disk, and {answers or output} is none. Name a "
            f"folder that all parts see: --set {setting}=DIR."
        )


def task_size(count: int, answers: int, share: Share | None, device: str) -> int:
    """Into tasks of how many things work is cut, of so many with so many answers each."""
    if device == SERVER:  # requests are sent side by side within a task
        return max(1, -(-count // (share or WHOLE).count))
    size = ANSWERS_PER_TASK // answers
    if share and share.count > 1:
        size = min(size, count // (TASKS_PER_PART * share.count))
    return max(1, size)
