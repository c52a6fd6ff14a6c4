"""Rows as text, as token ids and with reference log-probs; rejected rows and their reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .columns import ColumnTable, Ragged, column

Message: TypeAlias = "Mapping[str, Any]"  # {"role": ..., "content": ...}
Text: TypeAlias = "str | tuple[Message, ...]"  # plain text, or a conversation

REASONS = (
    "schema",
    "null",
    "empty_prompt",
    "empty_completion",
    "too_long",
    "bad_utf8",
    "bad_label",
    "bad_number",
    "template_error",
    "already_rendered",
    "boundary",
    "zero_completion_tokens",
    "no_mismatch",
    "nonfinite_logp",
    "oom",
)


class Role(IntEnum):
    """The role of a branch."""

    CHOSEN = 0
    REJECTED = 1
    DESIRABLE = 2
    UNDESIRABLE = 3
    CANDIDATE = 4
    MISMATCHED = 5


class BadRow(Exception):  # noqa: N818 - not an error of the program: one row goes to quarantine
    """One record that cannot be used, with a reason from REASONS."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Rejected:
    """A record in quarantine: its file and row, and the reason that it cannot be used."""

    file: int  # its identity
    row: int
    reason: str
    detail: str


@dataclass(frozen=True)
class Record:
    """One checked record, not yet tokenized; all three tuples have one entry per branch."""

    file: int  # its identity
    row: int  # 0-based within its file
    prompt: Text
    completions: tuple[Text, ...]
    roles: tuple[Role, ...]
    scores: tuple[float | None, ...]
    tools: tuple[Any, ...] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_conversation(self) -> bool:
        """Whether the prompt is a list of messages."""
        return not isinstance(self.prompt, str)


@dataclass(frozen=True)
class PromptKeys(ColumnTable):
    """Numbers that identify each row's prompt by its text, not by its token ids."""

    prompt: NDArray[np.bytes_] = column("row")  # S16: a digest, equal only for equal prompts
    split: NDArray[np.uint64] = column("row")  # decides the side of the held-out split
    sketch: NDArray[np.uint64] = column("row")  # MinHash: nearly equal prompts share most bytes


@dataclass(frozen=True)
class Tree:
    """One prompt and the branches that are scored on it in one sequence."""

    prompt: NDArray[np.int32]
    branches: tuple[NDArray[np.int32], ...]

    @property
    def num_tokens(self) -> int:
        """Length of `[prompt | branch 1 | branch 2 | ...]`."""
        return len(self.prompt) + sum(map(len, self.branches))


@dataclass(frozen=True)
class RowBlock(ColumnTable):
    """Tokenized rows, column by column; branches of row i are `branch_offsets[i]:[i + 1]`."""

    row_id: NDArray[np.bytes_] = column("row")  # S16, raw digest of the row's content
    copy: NDArray[np.int32] = column("row")  # 0 for the first row with this content, then 1, ...
    file: NDArray[np.uint64] = column("row")  # its identity
    row: NDArray[np.int64] = column("row")
    prompt_keys: PromptKeys = column("row")
    prompts: Ragged = column("row")  # int32
    prompt_cut: NDArray[np.int32] = column("row")  # prompt tokens removed by truncation
    branch_offsets: NDArray[np.int64] = column("offsets")  # (rows + 1,)
    completions: Ragged = column("branch")  # int32
    roles: NDArray[np.int8] = column("branch")
    scores: NDArray[np.float64] = column("branch", missing=math.nan)  # NaN: the data gives none
    cut: NDArray[np.int32] = column("branch")  # completion tokens removed by truncation
    carried: Mapping[str, NDArray[np.float64]] = column("row")

    def __len__(self) -> int:
        return len(self.row)

    @property
    def row_of_branch(self) -> NDArray[np.int64]:
        """The index of each branch's row."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.branch_offsets))

    def trees(self) -> tuple[Tree, ...]:
        """The prompt tree of each row."""
        ends = self.branch_offsets.tolist()
        return tuple(
            Tree(prompt, tuple(self.completions[branch] for branch in range(start, end)))
            for prompt, start, end in zip(self.prompts, ends, ends[1:], strict=False)
        )


@dataclass(frozen=True)
class ScoredBlock(ColumnTable):
    """Rows with their reference log-probs."""

    rows: RowBlock = column("row")
    logps: NDArray[np.float64] = column("branch")  # sums over completion tokens
    token_logps: Ragged | None = column("branch")  # float32 lists, when the cache keeps them


class OutOfMemory(Exception):  # noqa: N818 - a request to try again with less
    """Memory ran out for this batch; a smaller one may fit."""


class Scorer(Protocol):
    """A scorer: log-probabilities of branches, given their prompts."""

    @property
    def pads(self) -> bool:
        """Whether every tree of a batch is padded to the longest of them."""
        ...

    def score(self, trees: Sequence[Tree]) -> NDArray[np.float32]:
        """Log p of every completion token of a batch, in the order tree, branch, token."""
        ...

    def in_float32(self) -> AbstractContextManager[None]:
        """Computes in float32 inside the block; OutOfMemory if that does not fit."""
        ...

    def describe(self) -> Mapping[str, str]:
        """The numerics of scores that are decided when the weights are loaded, by name."""
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


# Nats per token by which a score may differ when its batch had another shape.
PER_TOKEN = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
# The least tolerance per sequence: that of short completions in float32.
LEAST = 1e-4


def allowed_gaps(num_tokens: NDArray[np.int64], *dtypes: str) -> NDArray[np.float64]:
    """The tolerance of each sequence's score, for the coarsest of the dtypes."""
    per_token = max(PER_TOKEN[dtype] for dtype in dtypes)
    allowed: NDArray[np.float64] = np.maximum(LEAST, per_token * num_tokens)
    return allowed


def rounding_of(*dtypes: str) -> float:
    """The rounding of a sequence's log-prob, in nats, below which rewards count as tied.

    1e-4 in float32, and scaled by the tolerance per token in a coarser dtype: 0.05 in float16, 0.2
    in bfloat16. It is independent of the length, because roundings of many tokens cancel.
    """
    return LEAST * max(PER_TOKEN[dtype] for dtype in dtypes) / PER_TOKEN["float32"]
