"""The work of sampling as tasks: groups of prompts, of which only missing samples are asked for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from ...schemas.errors import AlignError, counted
from ...schemas.samples import (
    OpenSampler,
    Prompt,
    Refused,
    Sample,
    Sampler,
    Sampling,
    Wanted,
    sample_key,
)
from ...stages.sample.prompts import characters
from ...stages.tracking.progress import Progress
from ..executors.executor import one_by_one
from ..jobs.counts import Counts
from .answer_tasks import AnswerTasks


@dataclass
class SampleTally(Counts):
    """Counts of what was sampled now."""

    new: int = 0
    cut: int = 0  # of the new ones, at max_new_tokens
    empty: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    known: int = 0  # samples that were there before
    seconds: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)  # reasons by the keys of prompts

    @property
    def step(self) -> int:
        """The samples made now."""
        return self.new

    def count(self, group: Sequence[Sample | Refused]) -> None:
        """Adds a group."""
        for one in group:
            if isinstance(one, Refused):
                self.refused[one.prompt] = one.reason
                continue
            self.new += 1
            self.cut += one.finish == "length"
            self.empty += is_empty(one.text)
            self.prompt_tokens += one.prompt_tokens
            self.completion_tokens += one.completion_tokens

    def metrics(self) -> dict[str, float]:
        """The counts as metrics of a tracking store."""
        return {
            "samples/new": float(self.new),
            "samples/cut": float(self.cut),
            "samples/empty": float(self.empty),
            "samples/refused_prompts": float(len(self.refused)),
            "tokens": float(self.completion_tokens),
            "tokens_per_second": self.completion_tokens / max(self.seconds, 1e-9),
        }

    def text(self) -> str:
        """The counts of new and known samples."""
        made = f"{counted(self.new, 'samples')} made now, {self.known:,} known before"
        return f"{made}, in {self.seconds:.1f} s"


def is_empty(text: str) -> bool:
    """Whether a sample says nothing."""
    return not text.strip()


@dataclass(frozen=True)
class SampleTasks(AnswerTasks):
    """Groups of prompts, and what samples them."""

    sampler: Sampler
    identity: Mapping[str, str]
    sampling: Sampling
    n: int
    groups: tuple[tuple[Prompt, ...], ...]

    name = "sampling"
    unit = "samples"

    @cached_property
    def sizes(self) -> Sequence[int]:
        """The samples of each group, known ones too."""
        return [len(group) * self.n for group in self.groups]

    @cached_property
    def costs(self) -> Sequence[float]:
        """The characters of the prompts, and the most tokens that may be drawn."""
        most = self.n * self.sampling.max_new_tokens
        return [
            float(sum(characters(prompt.text) + most for prompt in group)) for group in self.groups
        ]

    def key(self, prompt: str, number: int) -> str:
        """The key of a sample."""
        return sample_key(prompt, number, self.sampling, self.identity)

    def missing(self, task: int) -> list[Wanted]:
        """The samples of a group that nobody has."""
        wanted = []
        for prompt in self.groups[task]:
            key = prompt.key
            numbers = [one for one in range(self.n) if self.key(key, one) not in self.answers]
            if numbers:
                wanted.append(Wanted(prompt, tuple(numbers)))
        return wanted

    def open(self, progress: Progress) -> Callable[[Iterable[int]], Generator[SampleTally]]:
        """Loads the model once a group needs it."""
        return one_by_one(_GroupSampler(self, progress).sample)


@dataclass(frozen=True)
class _GroupSampler:
    tasks: SampleTasks
    progress: Progress

    def sample(self, task: int) -> SampleTally:
        """Samples what a group misses; each part is durable before the next is asked for."""
        tasks, tally = self.tasks, SampleTally()
        wanted = tasks.missing(task)
        waiting = {tasks.key(one.prompt.key, number) for one in wanted for number in one.numbers}
        self.progress.advance(tasks.sizes[task] - len(waiting))
        for group in self._model.sample(wanted):
            samples = [one for one in group if isinstance(one, Sample)]
            refused = [one for one in group if isinstance(one, Refused)]
            tasks.answers.add(
                {tasks.key(one.prompt, one.number): asdict(one) for one in samples},
                {tasks.key(one.prompt, one.number): one.reason for one in refused},
            )
            tally.count(group)
            waiting -= {tasks.key(one.prompt, one.number) for one in group}
            tokens = sum(one.completion_tokens for one in samples)
            self.progress.advance(len(group), tokens=tokens)
        if waiting:
            raise AlignError(
                f"{counted(len(waiting), 'samples')} of a group did not come. Run the same "
                "command again: what came is kept."
            )
        return tally

    @cached_property
    def _model(self) -> OpenSampler:
        return self.tasks.sampler.open(self.tasks.sampling)
