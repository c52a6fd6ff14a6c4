"""A row is a prompt with branches: first as text, then as token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .ragged import Ragged, offsets_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    """A record in quarantine: where it stood and why it cannot be used."""

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
    """What each row's prompt says, in numbers; token ids have no part in them."""

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
    copy: NDArray[np.int32]  # (rows,) 0 for the first row with this content, 1 for its twin, ...
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
        every = np.arange(self.branch_offsets[-1], dtype=np.int64)
        return Ragged(every, self.branch_offsets).take(rows).values

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
