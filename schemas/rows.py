"""Rows as text, the scorers of rows, and rejected rows with their reasons."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .columns import Ragged
    from .row_table import Rows

Message: TypeAlias = "Mapping[str, Any]"  # {"role": ..., "content": ...}
Text: TypeAlias = "str | tuple[Message, ...]"  # plain text, or a conversation

TIE = "tie"  # neither answer won: such a row is skipped, but is not wrong
REASONS = (
    "schema",
    "empty_prompt",
    "empty_completion",
    "too_long",
    "too_large",
    TIE,
    "template_error",
    "nothing_learned",
    "no_mismatch",
    "nonfinite_logp",
    "oom",
)


class Role(IntEnum):
    """The role of a completion."""

    CHOSEN = 0
    REJECTED = 1
    DESIRABLE = 2
    UNDESIRABLE = 3
    CANDIDATE = 4
    MISMATCHED = 5


class BadRow(Exception):  # noqa: N818 - not an error of the program: one row is rejected
    """A row cannot be used, for a reason from REASONS."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(detail)
        self.reason = reason
        self.detail = detail

    def at(self, file: int, row: int) -> Rejected:
        """The rejected row, with its file and number."""
        return Rejected(file, row, self.reason, self.detail)


@dataclass(frozen=True)
class Rejected:
    """A rejected row: its file, its number, and the reason."""

    file: int  # its identity
    row: int
    reason: str
    detail: str


@dataclass(frozen=True)
class TextRow:
    """One checked row as text; each tuple has one entry per completion."""

    file: int  # its identity
    row: int  # 0-based within its file
    prompt: Text
    completions: tuple[Text, ...]
    roles: tuple[Role, ...]
    scores: tuple[float | None, ...]
    tools: tuple[Any, ...] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, float] = field(default_factory=dict)
    # The learned messages of each completion; None: all of them.
    learned: tuple[tuple[bool, ...] | None, ...] = ()

    def learned_of(self, number: int) -> tuple[bool, ...] | None:
        """The learned messages of a completion; None: all of them."""
        return self.learned[number] if self.learned else None

    @property
    def is_conversation(self) -> bool:
        """Whether the prompt is a list of messages."""
        return not isinstance(self.prompt, str)


CONTENT_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=repr)


def prompt_digest(
    prompt: Text, tools: Sequence[Any] | None, template_options: Mapping[str, Any]
) -> bytes:
    """The digest that identifies a prompt in caches and tables: a hash of all that a model sees.

    Token ids do not identify a prompt: if its end falls inside a token, they depend on the
    completion.
    """
    if isinstance(prompt, str):  # plain text has no tools and no template options
        content = f"[{CONTENT_JSON.encode(prompt)},null,{{}}]"
    else:
        content = CONTENT_JSON.encode([prompt, tools, template_options])
    return blake2b(content.encode(), digest_size=16, person=b"align prompt").digest()


@dataclass(frozen=True)
class Tree:
    """One prompt and the branches that are scored on it in one sequence."""

    prompt: NDArray[np.int32]
    branches: tuple[NDArray[np.int32], ...]

    @property
    def num_tokens(self) -> int:
        """Length of `[prompt | branch 1 | branch 2 | ...]`."""
        return len(self.prompt) + sum(map(len, self.branches))


def sums_of_completions(
    token_logps: Ragged, is_learned: NDArray[np.bool_] | None
) -> NDArray[np.float64]:
    """The sum of each completion's learned log-probs, in float64; no completion is empty."""
    if not len(token_logps):
        return np.empty(0, dtype=np.float64)
    values = token_logps.values.astype(np.float64)
    if is_learned is not None:
        values[~is_learned] = 0.0
    # Infinities of both signs make a NaN, which rejects the row: no warning is needed.
    with np.errstate(invalid="ignore"):
        sums: NDArray[np.float64] = np.add.reduceat(values, token_logps.offsets[:-1])
    return sums


@dataclass(frozen=True)
class Rescored:
    """A second scoring of scored rows, compared with the first; one value per completion."""

    logps: NDArray[np.float64]
    gaps: NDArray[np.float64]  # to the rows' log-probs
    excess: NDArray[np.float64]  # over the tolerance; NaN where a log-prob is

    @staticmethod
    def of(rows: Rows, token_logps: Ragged, *dtypes: str) -> Rescored:
        """Compares rows with new log-probs of their tokens."""
        logps = sums_of_completions(token_logps, rows.is_learned)
        gaps = np.abs(logps - rows.logps)
        return Rescored(logps, gaps, gaps - allowed_gaps(rows.num_learned, *dtypes))

    @property
    def worst(self) -> int:
        """The completion with the largest excess; NaN counts as the largest."""
        return int(np.argmax(self.excess))

    @property
    def is_same(self) -> bool:
        """Whether every log-prob is within the tolerance."""
        return bool((self.excess <= 0).all())


class OutOfMemory(Exception):  # noqa: N818 - a request to try again with less
    """Memory ran out for this batch; a smaller one may fit."""


class Scorer(Protocol):
    """A scorer: log-probabilities of completions, given their prompts."""

    @property
    def pads(self) -> bool:
        """Whether every tree of a batch is padded to the longest of them."""
        ...

    def launch(self, trees: Sequence[Tree]) -> Callable[[], NDArray[np.float32]]:
        """Starts to score a batch; OutOfMemory is raised here if it does not fit.

        The returned function waits for the values that `score` returns.
        """
        ...

    def score(self, trees: Sequence[Tree]) -> NDArray[np.float32]:
        """Log p of every completion token of a batch, in the order tree, branch, token."""
        ...

    def describe(self) -> Mapping[str, str]:
        """The numerics of scores, by name, that are known once the weights are loaded."""
        ...


class Reference(Protocol):
    """A reference whose identity is known before its weights are loaded."""

    def identity(self) -> Mapping[str, str]:
        """Named digests and settings; two references with equal identities give equal scores."""
        ...

    def hidden_size(self) -> int:
        """Width of the residual stream, for the planner's cost of attention."""
        ...

    def open(self) -> Scorer:
        """A scorer with the weights loaded."""
        ...


# Nats per token by which a score may differ in a batch of another shape.
PER_TOKEN = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
# The least tolerance per sequence: that of short completions in float32.
LEAST = 1e-4


def allowed_gaps(num_tokens: NDArray[np.int64], *dtypes: str) -> NDArray[np.float64]:
    """The tolerance of each completion's log-prob, for the coarsest of the dtypes."""
    per_token = max(PER_TOKEN[dtype] for dtype in dtypes)
    allowed: NDArray[np.float64] = np.maximum(LEAST, per_token * num_tokens)
    return allowed


def rounding_of(*dtypes: str) -> float:
    """The difference of log-probs, in nats, below which rewards count as tied.

    1e-4 in float32, 0.05 in float16 and 0.2 in bfloat16: it grows with the tolerance per token. It
    does not depend on the length, because the roundings of many tokens cancel.
    """
    return LEAST * max(PER_TOKEN[dtype] for dtype in dtypes) / PER_TOKEN["float32"]
