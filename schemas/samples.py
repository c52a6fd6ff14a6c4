"""Prompts, sampled completions, and the protocols of models that sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from .json_codec import digest
from .rows import BadRow, Text, prompt_digest

# stop: the model ended the sample; length: it was truncated; other: a server's other reason.
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
    """A prompt, with the data columns that its samples carry along."""

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
    """The sampling settings; a temperature of 0 means greedy decoding."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    max_new_tokens: int = 512
    seed: int = 0

    @property
    def distribution(self) -> Distribution:
        """The settings that change the probability of a token."""
        return Distribution(self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class Distribution:
    """The distribution that samples are drawn from: the model's, or a modified one."""

    temperature: float
    top_p: float
    top_k: int

    def __str__(self) -> str:
        """The settings in words, without top-p and top-k where they change nothing."""
        tail = [f"top-p {self.top_p:g}"] if self.top_p != 1 else []
        tail += [f"top-k {self.top_k}"] if self.top_k else []
        return ", ".join([f"temperature {self.temperature:g}", *tail])

    @property
    def is_unmodified(self) -> bool:
        """Whether samples have the model's own probabilities."""
        return self == Distribution(1.0, 1.0, 0)


@dataclass(frozen=True)
class SampleRequest:
    """A request for samples of one prompt, by their numbers from 0."""

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
    """A sample that the model cannot make, for example because the prompt exceeds its context."""

    prompt: str  # the prompt's key
    number: int
    reason: str


class Sampler(Protocol):
    """A model that completes prompts, in this process or behind a server.

    The methods with a body are defaults, for a model that accepts every prompt unchanged.
    """

    @property
    def device(self) -> str:
        """The device of the model: cpu, cuda, …, or SERVER."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Digests and names of all that determines the completions; loads no weights."""
        ...

    def open(self, sampling: Sampling) -> OpenSampler:
        """Loads the model."""
        ...

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template; plain prompts do not use it."""
        return False

    def normalized(self, prompt: Prompt) -> Prompt:
        """The prompt with its tool calls in the form that the chat template expects."""
        return prompt

    def refused(self, prompts: Sequence[Prompt], sampling: Sampling) -> Mapping[str, BadRow]:
        """The prompts that the model cannot complete, by key, as far as known before sampling."""
        return {}


class OpenSampler(Protocol):
    """A sampler with its weights loaded."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Sequence[Sample | Refused]]:
        """Yields all samples in groups, in any order, each group as soon as it is complete.

        The caller stores a group before it takes the next one. Refused samples are counted, and
        the next command requests them again.
        """
        ...


def sample_key(prompt: str, number: int, sampling: Sampling, identity: Mapping[str, str]) -> str:
    """The key of a sample: a hash of everything that determines it."""
    return digest(["sample", prompt, number, asdict(sampling), dict(identity)])[:KEY_LENGTH]
