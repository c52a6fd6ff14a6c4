"""Prompts, sampled completions, and the protocols of the models that sample them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from .json_codec import digest
from .rows import BadRow, Text, prompt_digest

# stop: the model ended the sample; length: it was cut; other: the server gave another reason.
Finish: TypeAlias = Literal["stop", "length", "other"]
SERVER = "server"  # the device of a model behind a server
KEY_LENGTH = 32  # hexadecimal digits
# The columns that a table of samples adds to its prompts.
SAMPLE_COLUMNS = (
    "prompt_key",
    "number",
    "completion",
    "finish",
    "prompt_tokens",
    "completion_tokens",
)


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the data columns that are carried along with its completions."""

    text: Text
    tools: tuple[Any, ...] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, Any] = field(default_factory=dict)  # such as a reference answer

    @property
    def key(self) -> str:
        """The prompt's digest, as in caches; carried columns do not change it."""
        return prompt_digest(self.text, self.tools, self.template_options).hex()


@dataclass(frozen=True)
class Sampling:
    """The sampling settings; a temperature of 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    max_new_tokens: int = 512
    seed: int = 0

    @property
    def drawing(self) -> Drawing:
        """The settings that decide the probability of a token."""
        return Drawing(self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class Drawing:
    """The distribution of samples: the model's own, or a modified one."""

    temperature: float
    top_p: float
    top_k: int

    def __str__(self) -> str:
        """The settings in words, without those that change nothing."""
        tail = [f"top-p {self.top_p:g}"] if self.top_p != 1 else []
        tail += [f"top-k {self.top_k}"] if self.top_k else []
        return ", ".join([f"temperature {self.temperature:g}", *tail])

    @property
    def is_own(self) -> bool:
        """Whether samples are drawn from the model's own probabilities."""
        return self == Drawing(1.0, 1.0, 0)


@dataclass(frozen=True)
class Wanted:
    """Some samples of one prompt, by their numbers from 0."""

    prompt: Prompt
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One sampled completion of a prompt."""

    prompt: str  # the prompt's key
    number: int
    text: str
    finish: Finish
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Refused:
    """A sample that a model cannot make, for example of a prompt longer than its context."""

    prompt: str  # the prompt's key
    number: int
    reason: str


class Sampler(Protocol):
    """A model that completes prompts, in this process or behind a server.

    Methods with a body are the defaults, for a model that takes every prompt as it is.
    """

    @property
    def device(self) -> str:
        """The device of the model: cpu, cuda, …, or SERVER."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Digests and names of everything that determines the completions; loads no weights."""
        ...

    def open(self, sampling: Sampling) -> OpenSampler:
        """The model, loaded and ready to sample."""
        ...

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template, which plain prompts do not use."""
        return False

    def fitted(self, prompt: Prompt) -> Prompt:
        """The prompt with its tool calls in the form that the model's template writes."""
        return prompt

    def refused(self, prompts: Sequence[Prompt], sampling: Sampling) -> Mapping[str, BadRow]:
        """The prompts, by key, that are known beforehand to be impossible to complete."""
        return {}


class OpenSampler(Protocol):
    """A sampler with its weights loaded."""

    def sample(self, wanted: Sequence[Wanted]) -> Iterator[Sequence[Sample | Refused]]:
        """Yields all samples in groups, in any order, each group as soon as it is complete.

        A group is stored before the next one is requested. Refused samples are counted, and the
        next command requests them again.
        """
        ...


def sample_key(prompt: str, number: int, sampling: Sampling, identity: Mapping[str, str]) -> str:
    """The key of a sample: a hash of everything that determines it."""
    return digest(["sample", prompt, number, asdict(sampling), dict(identity)])[:KEY_LENGTH]
