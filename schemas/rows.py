"""A row, as text, as token ids and with its scores; and what a rejected row and its reason are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
    """What a branch is to its prompt."""

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
    """A record in quarantine: where it was and why it cannot be used."""

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
class PromptKeys:
    """Numbers that identify each row's prompt by its text, not by its token ids."""

    prompt: NDArray[np.bytes_]  # (rows,) S16: equal for equal prompts, and for no others
    split: NDArray[np.uint64]  # (rows,) decides the side of the held-out split
    sketch: NDArray[np.uint64]  # (rows,) alike in most of its bytes for nearly equal prompts

    def take(self, rows: NDArray[np.int64]) -> PromptKeys:
        """Those of the rows at `rows`, in that order."""
        return PromptKeys(self.prompt[rows], self.split[rows], self.sketch[rows])

    @staticmethod
    def concat(parts: Sequence[PromptKeys]) -> PromptKeys:
        """Joins several, in order."""
        return PromptKeys(
            np.concatenate([part.prompt for part in parts]),
            np.concatenate([part.split for part in parts]),
            np.concatenate([part.sketch for part in parts]),
        )


@dataclass(frozen=True)
class RowBlock:
    """Tokenized rows, column by column; branches of row i are `branch_offsets[i]:[i + 1]`."""

    row_id: NDArray[np.bytes_]  # (rows,) S16, raw digest of the row's content
    copy: NDArray[np.int32]  # (rows,) 0 for the first row with this content, 1 for the next, ...
    file: NDArray[np.uint64]  # (rows,) its identity
    row: NDArray[np.int64]  # (rows,)
    prompt_keys: PromptKeys  # (rows,)
    prompts: Ragged  # (rows,) int32
    prompt_cut: NDArray[np.int32]  # (rows,) prompt tokens removed by truncation
    branch_offsets: NDArray[np.int64]  # (rows + 1,)
    completions: Ragged  # (branches,) int32
    roles: NDArray[np.int8]  # (branches,)
    scores: NDArray[np.float64]  # (branches,) NaN where the data gives none
    cut: NDArray[np.int32]  # (branches,) completion tokens removed by truncation
    carried: Mapping[str, NDArray[np.float64]]  # each (rows,)

    def __len__(self) -> int:
        return len(self.row)

    @property
    def row_of_branch(self) -> NDArray[np.int64]:
        """The row each branch belongs to."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.branch_offsets))

    def branches_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The branches of the rows at `rows`, in that order."""
        return joined_ranges(self.branch_offsets[rows], np.diff(self.branch_offsets)[rows])

    def take(self, rows: NDArray[np.int64]) -> RowBlock:
        """The rows at `rows`, in that order."""
        branches = self.branches_of(rows)
        return RowBlock(
            row_id=self.row_id[rows],
            copy=self.copy[rows],
            file=self.file[rows],
            row=self.row[rows],
            prompt_keys=self.prompt_keys.take(rows),
            prompts=self.prompts.take(rows),
            prompt_cut=self.prompt_cut[rows],
            branch_offsets=offsets_of(np.diff(self.branch_offsets)[rows]),
            completions=self.completions.take(branches),
            roles=self.roles[branches],
            scores=self.scores[branches],
            cut=self.cut[branches],
            carried={name: column[rows] for name, column in self.carried.items()},
        )

    @staticmethod
    def concat(blocks: Sequence[RowBlock]) -> RowBlock:
        """Joins several, in order; all carry the same columns."""
        branch_counts = np.concatenate([np.diff(block.branch_offsets) for block in blocks])
        return RowBlock(
            row_id=np.concatenate([block.row_id for block in blocks]),
            copy=np.concatenate([block.copy for block in blocks]),
            file=np.concatenate([block.file for block in blocks]),
            row=np.concatenate([block.row for block in blocks]),
            prompt_keys=PromptKeys.concat([block.prompt_keys for block in blocks]),
            prompts=Ragged.concat([block.prompts for block in blocks]),
            prompt_cut=np.concatenate([block.prompt_cut for block in blocks]),
            branch_offsets=offsets_of(branch_counts),
            completions=Ragged.concat([block.completions for block in blocks]),
            roles=np.concatenate([block.roles for block in blocks]),
            scores=np.concatenate([block.scores for block in blocks]),
            cut=np.concatenate([block.cut for block in blocks]),
            carried={
                name: np.concatenate([block.carried[name] for block in blocks])
                for name in blocks[0].carried
            },
        )


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
class ScoredBlock:
    """Rows with their reference log-probs; the last two are per branch, in branch order."""

    rows: RowBlock
    logps: NDArray[np.float64]  # (branches,) sums over completion tokens
    token_logps: Ragged | None  # (branches,) float32 lists, when the cache keeps them

    def take(self, rows: NDArray[np.int64]) -> ScoredBlock:
        """The rows at `rows`, in that order."""
        branches = self.rows.branches_of(rows)
        tokens = self.token_logps.take(branches) if self.token_logps else None
        return ScoredBlock(self.rows.take(rows), self.logps[branches], tokens)


class OutOfMemory(Exception):  # noqa: N818 - a request to try again with less
    """The scorer had no room for this batch; a smaller one may fit."""


class Scorer(Protocol):
    """Log-probabilities of branches, given their prompts."""

    @property
    def pads(self) -> bool:
        """Whether every tree of a batch takes as many tokens as the longest of them."""
        ...

    def score(self, trees: Sequence[Tree]) -> NDArray[np.float32]:
        """Scores one batch: log p of every completion token, in the order tree, branch, token."""
        ...

    def in_float32(self) -> AbstractContextManager[None]:
        """Computes in float32 inside the block; OutOfMemory if that does not fit."""
        ...

    def describe(self) -> Mapping[str, str]:
        """How scores are computed, as far as that is decided once the weights are loaded."""
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
        """Loads the weights."""
        ...


# Nats per token by which a score may differ when its batch had another shape.
PER_TOKEN = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
# In float32 short completions are held to this per sequence, however few their tokens.
LEAST = 1e-4


def allowed_gaps(num_tokens: NDArray[np.int64], *dtypes: str) -> NDArray[np.float64]:
    """What each sequence may differ by; the coarsest of the dtypes that took part counts."""
    per_token = max(PER_TOKEN[dtype] for dtype in dtypes)
    allowed: NDArray[np.float64] = np.maximum(LEAST, per_token * num_tokens)
    return allowed


def rounding_of(*dtypes: str) -> float:
    """What rewards are compared to: by how much rounding alone moves a sequence, in nats.

    1e-4 in float32, and in a coarser dtype as many times more as a token may differ by: 0.05 in
    float16, 0.2 in bfloat16. Whatever its length, for roundings of many tokens cancel.
    """
    return LEAST * max(PER_TOKEN[dtype] for dtype in dtypes) / PER_TOKEN["float32"]


@dataclass(frozen=True)
class Ragged:
    """`values[offsets[i]:offsets[i + 1]]` is list i."""

    values: NDArray[Any]  # (total,)
    offsets: NDArray[np.int64]  # (lists + 1,), offsets[0] == 0

    @staticmethod
    def of(lists: Sequence[Any], dtype: Any) -> Ragged:
        """Packs Python lists or arrays."""
        lengths = np.fromiter((len(item) for item in lists), dtype=np.int64, count=len(lists))
        filled = [np.asarray(item, dtype=dtype) for item in lists if len(item)]
        values = np.concatenate(filled) if filled else np.empty(0, dtype=dtype)
        return Ragged(values, offsets_of(lengths))

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Joins several, in order."""
        lengths = np.concatenate([part.lengths for part in parts])
        return Ragged(np.concatenate([part.values for part in parts]), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How long each list is."""
        return np.diff(self.offsets)

    def take(self, indices: NDArray[np.int64]) -> Ragged:
        """The lists at `indices`, in that order."""
        lengths = self.lengths[indices]
        places = joined_ranges(self.offsets[indices], lengths)
        return Ragged(self.values[places], offsets_of(lengths))

    def slice(self, start: int, stop: int) -> Ragged:
        """Lists `start` to `stop`, without copying values."""
        first, last = self.offsets[start], self.offsets[stop]
        return Ragged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def head(self, limits: NDArray[np.int64]) -> Ragged:
        """Each list cut to at most `limits[i]` leading values."""
        lengths = np.minimum(self.lengths, limits)
        if (lengths == self.lengths).all():
            return self
        places = joined_ranges(self.offsets[:-1], lengths)
        return Ragged(self.values[places], offsets_of(lengths))


def offsets_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Running totals with a leading zero."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def joined_ranges(starts: NDArray[np.int64], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """`starts[i], starts[i] + 1, ...`, `lengths[i]` numbers of it, range after range."""
    offsets = offsets_of(lengths)
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1], dtype=np.int64)
