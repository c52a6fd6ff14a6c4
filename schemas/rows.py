"""Rows as text, as token ids and with reference log-probs; rejected rows and their reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .columns import ColumnTable, Ragged, column
from .turns import WHOLE, learned_counts

Message: TypeAlias = "Mapping[str, Any]"  # {"role": ..., "content": ...}
Text: TypeAlias = "str | tuple[Message, ...]"  # plain text, or a conversation

TIE = "tie"  # two answers of which none won: nothing is wrong with such a row
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
    """The role of a branch."""

    CHOSEN = 0
    REJECTED = 1
    DESIRABLE = 2
    UNDESIRABLE = 3
    CANDIDATE = 4
    MISMATCHED = 5


class BadRow(Exception):  # noqa: N818 - not an error of the program: one row is rejected
    """One record that cannot be used, with a reason from REASONS."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Rejected:
    """A record that is rejected: its file and row, and the reason that it cannot be used."""

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
    # Of each completion, which of its messages are learned; None: all of them.
    learned: tuple[tuple[bool, ...] | None, ...] = ()

    def learned_of(self, number: int) -> tuple[bool, ...] | None:
        """Which messages of a completion are learned, where its data leave some out."""
        return self.learned[number] if self.learned else None

    @property
    def is_conversation(self) -> bool:
        """Whether the prompt is a list of messages."""
        return not isinstance(self.prompt, str)


@dataclass(frozen=True)
class PromptKeys(ColumnTable):
    """Numbers that identify each row's prompt by its text, not by its token ids."""

    # A digest, equal only for equal prompts.
    prompt: NDArray[np.bytes_] = column("row", "S16", stored="prompt_key")
    # It decides the side of the held-out split.
    split: NDArray[np.uint64] = column("row", "u8", stored="split_key")


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

    row_id: NDArray[np.bytes_] = column("row", "S16")  # raw digest of the row's content
    copy: NDArray[np.int32] = column("row", "i4")  # 0: the first row with this content, then 1, ...
    file: NDArray[np.uint64] = column("row", "u8")  # its identity
    row: NDArray[np.int64] = column("row", "i8")
    prompt_keys: PromptKeys = column("row", within=PromptKeys)
    prompts: Ragged = column(
        "row", "i4", is_list=True, stored="prompt_ids", counted="prompt_tokens"
    )
    prompt_cut: NDArray[np.int32] = column("row", "i4", stored="prompt_cut")  # tokens removed
    branch_offsets: NDArray[np.int64] = column("offsets", "i8")  # (rows + 1,)
    completions: Ragged = column(
        "branch", "i4", is_list=True, stored="completion_ids", counted="num_tokens"
    )
    roles: NDArray[np.int8] = column("branch", "i1", stored="role")
    # NaN: the data gives none.
    scores: NDArray[np.float64] = column("branch", "f8", missing=math.nan, stored="score")
    cut: NDArray[np.int32] = column("branch", "i4", stored="cut")  # completion tokens removed
    carried: Mapping[str, NDArray[np.float64]] = column("row", "f8", is_named=True)
    # What is learned of completions of several messages; see turns.py.
    turns: Ragged | None = column(
        "token", "i2", missing=WHOLE, of="completions", is_list=True, stored="completion_turns"
    )

    def __len__(self) -> int:
        return len(self.row)

    @property
    def row_of_branch(self) -> NDArray[np.int64]:
        """The index of each branch's row."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.branch_offsets))

    @property
    def is_learned(self) -> NDArray[np.bool_] | None:
        """Mask of the completions' tokens that are learned; None: all of them."""
        return None if self.turns is None else self.turns.values > 0

    @property
    def num_learned(self) -> NDArray[np.int64]:
        """The number of learned tokens of each completion."""
        return self.completions.lengths if self.turns is None else learned_counts(self.turns)

    def completion_bytes(self) -> Iterator[bytes]:
        """What identifies each completion: its ids, and what of them is learned."""
        for branch, ids in enumerate(self.completions):
            yield bytes_of(ids, None if self.turns is None else self.turns[branch])

    def ids(self) -> tuple[str, ...]:
        """Row ids as text: the hex of the digest, and `-<copy>` from the second copy on."""
        copies = (f"-{copy}" if copy else "" for copy in self.copy.tolist())
        digests = hex_texts(self.row_id, ID_DIGITS)
        return tuple(digest + copy for digest, copy in zip(digests, copies, strict=True))

    def trees(self) -> tuple[Tree, ...]:
        """The prompt tree of each row."""
        ends = self.branch_offsets.tolist()
        return tuple(
            Tree(prompt, tuple(self.completions[branch] for branch in range(start, end)))
            for prompt, start, end in zip(self.prompts, ends, ends[1:], strict=False)
        )


def bytes_of(ids: NDArray[np.int32], turns: NDArray[np.int16] | None) -> bytes:
    """What identifies a completion; of one turn that is all learned, the ids alone do."""
    if turns is None or (turns == WHOLE).all():
        return ids.tobytes()
    return b"".join((ids.tobytes(), b"turns", turns.astype("<i2").tobytes()))


ID_DIGITS = 32  # hex digits of a row's digest


def hex_texts(values: NDArray[Any], digits: int) -> list[str]:
    """The hex of each value's bytes."""
    text = np.ascontiguousarray(values).tobytes().hex()
    return [text[start : start + digits] for start in range(0, len(text), digits)]


@dataclass(frozen=True)
class ScoredBlock(ColumnTable):
    """Rows with their reference log-probs."""

    rows: RowBlock = column("row", within=RowBlock)
    # Sums over the learned tokens of completions.
    logps: NDArray[np.float64] = column("branch", "f8", stored="ref_logp")
    # None: the cache does not keep them.
    token_logps: Ragged | None = column(
        "token", "f4", of="rows.completions", is_list=True, stored="ref_token_logps"
    )


def sums_of_branches(
    token_logps: Ragged, is_learned: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """The sum of each branch's log-probs, of those that are learned, in float64.

    No branch is empty.
    """
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
    """Scored rows that were scored again; all three have a value per branch."""

    logps: NDArray[np.float64]
    gaps: NDArray[np.float64]  # from those of the rows
    excess: NDArray[np.float64]  # over the tolerance; NaN where a log-prob is

    @staticmethod
    def of(block: ScoredBlock, token_logps: Ragged, *dtypes: str) -> Rescored:
        """Compares rows with the log-probs that their tokens have now."""
        logps = sums_of_branches(token_logps, block.rows.is_learned)
        gaps = np.abs(logps - block.logps)
        return Rescored(logps, gaps, gaps - allowed_gaps(block.rows.num_learned, *dtypes))

    @property
    def worst(self) -> int:
        """The branch with the largest excess; NaN counts as the largest."""
        return int(np.argmax(self.excess))

    @property
    def is_same(self) -> bool:
        """Whether every log-prob is within the tolerance."""
        return bool((self.excess <= 0).all())


class OutOfMemory(Exception):  # noqa: N818 - a request to try again with less
    """Memory ran out for this batch; a smaller one may fit."""


class Scorer(Protocol):
    """A scorer: log-probabilities of branches, given their prompts."""

    @property
    def pads(self) -> bool:
        """Whether every tree of a batch is padded to the longest of them."""
        ...

    def launch(self, trees: Sequence[Tree]) -> Callable[[], NDArray[np.float32]]:
        """Begins to score a batch, which is refused here if it does not fit.

        The call that it returns waits for the values of `score`.
        """
        ...

    def score(self, trees: Sequence[Tree]) -> NDArray[np.float32]:
        """Log p of every completion token of a batch, in the order tree, branch, token."""
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
