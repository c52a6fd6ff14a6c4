"""The records of a cache: plan, shards, manifest, stop tokens, and the layout of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from .columns import joined_ranges, offsets_of
from .errors import CorruptionError
from .rows import Rejected, Role
from .samples import Distribution

FORMAT_VERSION = 5
IMPORTED = "imported.logps"  # in a fingerprint: the digest of another program's log-probs


def file_identity(sha256: str) -> int:
    """The number that identifies a data file: the first sixteen hex digits of its digest."""
    return int(sha256[:16], 16)


@dataclass(frozen=True)
class InputEntry:
    """One input file, identified by its content."""

    name: str  # file name without its folder
    bytes: int
    sha256: str
    rows: int

    @property
    def identity(self) -> int:
        """The file's number in the `source` column."""
        return file_identity(self.sha256)


@dataclass(frozen=True)
class FileEntry:
    """One stored file."""

    file: str  # relative to the cache folder
    bytes: int
    sha256: str
    rows: int


def reference_named(model: str, adapter: str) -> str:
    """A reference in a message: its folder, and that of its adapter."""
    return " with ".join(filter(None, (model, adapter)))


@dataclass(frozen=True)
class Plan:
    """The rows to score and their shards, fixed before scoring begins."""

    format_version: int
    plan_key: str  # sha256 over the fingerprint
    fingerprint: dict[str, str]  # every named thing the bytes of the cache depend on
    reference_key: str  # sha256 over the part of the fingerprint that decides a score
    model: str  # the path of the reference
    adapter: str
    inputs: tuple[InputEntry, ...]
    rows_in: int
    shards: tuple[int, ...]  # rows of each key range; one without rows has no shard
    rejected: tuple[Rejected, ...]  # by file and row, up to a limit
    reasons: dict[str, int]  # why rows are rejected -> rows
    notes: dict[str, int]  # harmless counts: rows truncated, repeated, ...
    reuse: tuple[str, ...]  # caches whose scores may be copied
    threads: int  # CPU threads of every worker: they decide the last bits of a sum
    sampling: tuple[Distribution | None, ...]  # as in the manifest

    @property
    def numbers(self) -> list[int]:
        """The numbers of the shards that have rows."""
        return [number for number, rows in enumerate(self.shards) if rows]


@dataclass(frozen=True)
class Shard:
    """The record of a finished shard: its file, and the counts and digests to verify it."""

    number: int
    file: str  # part-<number:08d>-<sha256[:16]>.parquet, inside data/
    bytes: int
    sha256: str
    rows: int
    branches: int
    tokens: int  # completion tokens scored or reused
    first_key: str  # hex of the first row's key
    last_key: str
    rejected: tuple[Rejected, ...]  # while scoring; the manifest lists them in a file
    reasons: dict[str, int]  # why rows are rejected while scoring -> rows
    notes: dict[str, int]  # counted while pairing and scoring, harmless
    numerics: dict[str, str]  # of the scoring path


NOT_IN_ROOT = ("align_version", "root", "model", "adapter", "sampling")


@dataclass(frozen=True)
class Manifest:
    """The whole cache; written last, so a manifest means that the work is done."""

    format_version: int
    align_version: str
    root: str  # the name of the cache: a digest of all but NOT_IN_ROOT
    model: str  # the path of the reference
    adapter: str
    plan_key: str
    fingerprint: dict[str, str]
    reference_key: str
    inputs: tuple[InputEntry, ...]
    rows_in: int
    rows: int
    branches: int
    tokens: int
    shards: tuple[Shard, ...]
    rejected: FileEntry | None  # the file that lists the rows that could not be used
    reasons: dict[str, int]  # the plan's and those of all shards
    notes: dict[str, int]  # the plan's and those of all shards
    # How the samples in each input were drawn; empty if unknown for all. Not part of the root.
    sampling: tuple[Distribution | None, ...]

    @property
    def is_scored(self) -> bool:
        """Whether the cache holds the reference's log-probs; else they are null."""
        return self.fingerprint.get("cache.scored") != "false"


Source: TypeAlias = Literal["template", "tokenizer"]
FIELD = "tokenizer.stop."  # prefix of the fingerprint's fields
_NONE = "none"


@dataclass(frozen=True)
class StopToken:
    """One token that ends completions."""

    token: int
    text: str
    source: Source  # written by the chat template, or the tokenizer's EOS

    def __str__(self) -> str:
        return f"{self.token} {self.source} {self.text}"

    @property
    def description(self) -> str:
        """The token and its source, for messages."""
        what = "as the chat template writes it" if self.source == "template" else "the EOS"
        return f"{self.text} ({self.token}), {what}"

    @staticmethod
    def read(written: str) -> StopToken | None:
        """The stop that `str` wrote; None if there was none."""
        if written == _NONE:
            return None
        token, source, text = written.split(" ", 2)
        return StopToken(int(token), text, cast("Source", source))


@dataclass(frozen=True)
class StopTokens:
    """The stop tokens of plain text, of a turn of a conversation, and of a turn with tool calls."""

    text: StopToken | None
    turn: StopToken | None
    tool_calls: StopToken | None

    @cached_property
    def tokens(self) -> frozenset[int]:
        """All stop tokens; a truncated completion ends with none of these."""
        every = (self.text, self.turn, self.tool_calls)
        return frozenset(stop.token for stop in every if stop)

    @cached_property
    def written(self) -> frozenset[int]:
        """The stop tokens of turns of conversations."""
        return frozenset(stop.token for stop in (self.turn, self.tool_calls) if stop)

    @cached_property
    def of_template(self) -> frozenset[int]:
        """The stop tokens that the chat template writes."""
        turns = (self.turn, self.tool_calls)
        return frozenset(stop.token for stop in turns if stop and stop.source == "template")

    def fields(self) -> dict[str, str]:
        """The stops as fields of a fingerprint."""
        named = {"text": self.text, "turn": self.turn, "tool_calls": self.tool_calls}
        return {f"{FIELD}{name}": str(stop) if stop else _NONE for name, stop in named.items()}

    @staticmethod
    def of(fingerprint: Mapping[str, str]) -> StopTokens:
        """The stops of a cache's fingerprint."""
        names = (f"{FIELD}{name}" for name in ("text", "turn", "tool_calls"))
        return StopTokens(*(StopToken.read(fingerprint.get(name, _NONE)) for name in names))


class StoredKind(IntEnum):
    """The kind of a stored row."""

    PAIRED = 0
    UNPAIRED = 1
    SCORED = 2


@dataclass(frozen=True)
class CompletionLayout:
    """The layout of the completions of stored rows.

    Each row has its own completions first, then the first KL completion of each, then the second.
    """

    starts: NDArray[np.int64]  # (rows,) index of the first own completion
    num_own: NDArray[np.int64]  # (rows,)
    num_partners: int  # KL completions of each own completion
    kinds: NDArray[np.int8]  # (rows,) as `StoredKind` numbers them


def completion_layout(
    roles: NDArray[np.int8], completion_offsets: NDArray[np.int64], *, source: str
) -> CompletionLayout:
    """The layout of stored rows, from the roles of their completions."""
    starts, num_all = completion_offsets[:-1], np.diff(completion_offsets)
    is_own = roles != Role.MISMATCHED
    num_own = np.diff(offsets_of(is_own)[completion_offsets])
    _require_kind(bool(num_own.all()), source)
    num_partners = int(num_all[0] // num_own[0]) - 1 if len(starts) else 0
    _require_kind(bool((num_all == num_own * (1 + num_partners)).all()), source)
    own = joined_ranges(starts, num_own)
    _require_kind(bool(is_own[own].all()), source)
    return CompletionLayout(starts, num_own, num_partners, _kinds(roles[own], num_own, source))


def _kinds(own: NDArray[np.int8], num_own: NDArray[np.int64], source: str) -> NDArray[np.int8]:
    offsets = offsets_of(num_own)

    def count(*wanted: Role) -> NDArray[np.int64]:
        of_row: NDArray[np.int64] = np.diff(offsets_of(np.isin(own, wanted))[offsets])
        return of_row

    is_paired = (count(Role.CHOSEN) == 1) & (count(Role.REJECTED) == 1) & (num_own == 2)
    is_unpaired = count(Role.DESIRABLE, Role.UNDESIRABLE) == num_own
    is_scored = count(Role.CANDIDATE) == num_own
    _require_kind(bool((is_paired | is_unpaired | is_scored).all()), source)
    kinds = np.full(len(is_paired), StoredKind.PAIRED, dtype=np.int8)
    kinds[is_unpaired], kinds[is_scored] = StoredKind.UNPAIRED, StoredKind.SCORED
    return kinds


def _require_kind(good: bool, source: str) -> None:
    if not good:
        raise CorruptionError(
            f"{source} holds rows that are neither pairs, labels nor scored completions. "
            "Restore it from a copy, or make the cache again."
        )
