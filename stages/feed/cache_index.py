"""Reads the narrow columns of a cache: kinds and lengths of rows, and which are held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...schemas.batches import StepSize
from ...schemas.cache import Shard, StoredKind
from ...schemas.columns import (
    arrow_column,
    joined_ranges,
    list_column,
    number_column,
    offsets_of,
)
from ...schemas.errors import CorruptionError
from ..storage.cache import Cache
from ..storage.shards import TURNS, learned_tokens, read_columns
from .select import BAD, GOOD, KindCounts, ReadSpec, context_lengths, held_out, select

if TYPE_CHECKING:
    from .file_weights import Draws

COLUMNS = ("prompt_tokens", "split_key", "role", "num_tokens", "score")
SOURCE = "source"  # the column with a row's data file and its number there
SCORES = "scores"  # the key of missing scores; no data column has this name
Check: TypeAlias = Callable[[Cache, Shard], None]


def unchecked(_: Cache, __: Shard) -> None:
    """No check, for a process whose machine has another one that checks the shards."""


class ShardColumns:
    """Reads narrow columns of shards; each shard is checked before its first read."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._checked: set[Path] = set()

    def read(
        self, folder: Cache, shard: Shard, names: Sequence[str]
    ) -> tuple[pa.Table, NDArray[np.int64]]:
        """These columns of a shard, and the number of rows of each of its row groups."""
        path = folder.shard(shard)
        if path not in self._checked:
            self._check(folder, shard)
            self._checked.add(path)
        return read_columns(path, names)


@dataclass(frozen=True)
class ReadRows:
    """The rows that a method reads from some row groups."""

    table: RowTable
    is_held_out: NDArray[np.bool_]  # (rows,)
    files: NDArray[np.int16]  # (rows,) index of the data file, if files have weights
    num_good: NDArray[np.int32]  # (rows,) chosen or desirable completions
    num_bad: NDArray[np.int32]  # (rows,) rejected or undesirable completions
    kinds: dict[StoredKind, KindCounts]  # of the stored rows, read or not
    missing: dict[str, int]  # rows without a number that the method needs, by the number's name
    num_partners: int  # KL completions per completion
    longest: int  # most tokens of a prompt and one completion, as the method reads them


def columns_of(spec: ReadSpec) -> tuple[str, ...]:
    """The columns that `read_table` reads."""
    return (*COLUMNS, TURNS, *((SOURCE,) if spec.file_weights else ()), *spec.columns)


def read_table(
    columns: pa.Table,
    sizes: NDArray[np.int64],
    spec: ReadSpec,
    source: str,
    files: Sequence[str] = (),
) -> ReadRows:
    """The rows in columns of row groups with these sizes; the table may be a slice of another.

    `files` are the identities of the data files, if files have weights.
    """
    prompt_lengths, keys = (number_column(columns, name) for name in ("prompt_tokens", "split_key"))
    tokens, roles = list_column(columns, "num_tokens"), list_column(columns, "role")
    scores = list_column(columns, "score")
    if not all(np.array_equal(roles.offsets, other.offsets) for other in (tokens, scores)):
        raise CorruptionError(f"{source} has lists of different lengths for its completions.")
    picked, mismatched, kinds = select(
        roles.values, scores.values, roles.offsets, spec=spec, source=source, split_keys=keys
    )
    rows, offsets = picked.rows, picked.offsets
    is_good, is_bad = np.isin(picked.roles, GOOD), np.isin(picked.roles, BAD)
    group_of = np.repeat(np.arange(len(sizes)), sizes)[rows]
    group_offsets = offsets_of(np.bincount(group_of, minlength=len(sizes)))
    partners = mismatched if spec.mismatched else mismatched[:, :0]
    lengths = tokens.values[np.column_stack([picked.indices, partners])]
    learned = learned_tokens(columns)[picked.indices]
    prompts = prompt_lengths[rows] + context_lengths(picked, spec)
    table = RowSizes(
        index_in_group=(np.arange(len(rows)) - group_offsets[group_of]).astype(np.int32),
        prompt_tokens=prompts.astype(np.int32),
        own_tokens=_sums(lengths[:, 0], offsets),
        learned_tokens=_sums(learned, offsets),
        chosen_tokens=_sums(learned * is_good, offsets),
        completion_offsets=offsets,
        mismatched_tokens=lengths[:, 1:],
    )

    missing = {}
    if spec.needs_scores:
        missing[SCORES] = len(np.unique(rows[picked.row_of[~np.isfinite(picked.scores)]]))
    for name in spec.columns:
        values = number_column(columns, name)[np.unique(rows)]
        missing[name] = int((~np.isfinite(values)).sum())
    file_of = np.zeros(len(rows), np.int16)
    if files:
        named = arrow_column(columns, SOURCE).field("file")
        found = pc.index_in(named, value_set=pa.array(files, named.type))
        if found.null_count:
            raise CorruptionError("it has rows of a data file that the manifest does not list.")
        file_of = found.to_numpy().astype(np.int16)[rows]
    longest = np.repeat(table.prompt_tokens, picked.counts) + lengths.max(axis=1, initial=0)
    return ReadRows(
        table=RowTable(group_offsets, table),
        is_held_out=held_out(keys, spec.eval_fraction)[rows],
        files=file_of,
        num_good=_sums(is_good, offsets),
        num_bad=_sums(is_bad, offsets),
        kinds=kinds,
        missing=missing,
        num_partners=mismatched.shape[1],
        longest=int(longest.max(initial=0)),
    )


def _sums(values: NDArray[np.generic], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """The sum over each row's completions."""
    return np.diff(offsets_of(values)[offsets]).astype(np.int32)


_PER_ROW = ("index_in_group", "prompt_tokens", "own_tokens", "learned_tokens", "chosen_tokens")


@dataclass(frozen=True)
class RowSizes:
    """Lengths of rows, in 28 bytes per row and 4 per KL completion."""

    index_in_group: NDArray[np.int32]  # (rows,) among the rows read from the row group
    prompt_tokens: NDArray[np.int32]  # (rows,)
    own_tokens: NDArray[np.int32]  # (rows,) of completions
    learned_tokens: NDArray[np.int32]  # (rows,) of completions
    chosen_tokens: NDArray[np.int32]  # (rows,) learned, of chosen or desirable completions
    completion_offsets: NDArray[np.int64]  # (rows + 1,) into the own completions
    mismatched_tokens: NDArray[np.int32]  # (completions, partners)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def take(self, rows: NDArray[np.int64]) -> RowSizes:
        """The lengths of these rows."""
        counts = np.diff(self.completion_offsets)[rows]
        completions = joined_ranges(self.completion_offsets[rows], counts)
        per_row = {name: getattr(self, name)[rows] for name in _PER_ROW}
        return RowSizes(
            **per_row,
            completion_offsets=offsets_of(counts),
            mismatched_tokens=self.mismatched_tokens[completions],
        )

    @staticmethod
    def concat(parts: Sequence[RowSizes]) -> RowSizes:
        """The lengths of all parts' rows, in order."""
        joined = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in (*_PER_ROW, "mismatched_tokens")
        }
        counts = np.concatenate([np.diff(part.completion_offsets) for part in parts])
        return RowSizes(**joined, completion_offsets=offsets_of(counts))

    def tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of each of these rows: its prompt and own completions."""
        return self.prompt_tokens[rows].astype(np.int64) + self.own_tokens[rows]


@dataclass(frozen=True)
class RowTable:
    """Lengths of rows, numbered as they are stored."""

    group_offsets: NDArray[np.int64]  # (row groups + 1,) into the rows
    sizes: RowSizes
    draws: Draws | None = None  # in an epoch; None: every row once

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def rows_per_epoch(self) -> int:
        """The number of draws in an epoch; a row counts as often as it is drawn."""
        return len(self) if self.draws is None else len(self.draws)

    @property
    def num_partners(self) -> int:
        """The number of KL completions per completion."""
        return int(self.sizes.mismatched_tokens.shape[1])

    def group_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each row's row group."""
        return np.searchsorted(self.group_offsets, rows, side="right") - 1

    def num_completions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of own completions of each row."""
        return self.sizes.completion_offsets[rows + 1] - self.sizes.completion_offsets[rows]

    def size_of(self, rows: NDArray[np.int64]) -> StepSize:
        """The size of a step of these rows."""
        return StepSize(
            rows=len(rows),
            completions=int(self.num_completions(rows).sum()),
            tokens=int(self.sizes.learned_tokens[rows].sum(dtype=np.int64)),
            chosen_tokens=int(self.sizes.chosen_tokens[rows].sum(dtype=np.int64)),
        )

    def keep(self, kept: NDArray[np.bool_]) -> RowTable:
        """The rows where `kept`, in the same row groups."""
        return RowTable(offsets_of(kept)[self.group_offsets], self.sizes.take(np.flatnonzero(kept)))

    @staticmethod
    def concat(tables: Sequence[RowTable], *, num_partners: int) -> RowTable:
        """One table of consecutive row groups; `tables` may be empty."""
        none = np.empty(0, dtype=np.int64)
        no_rows = RowSizes(
            **dict.fromkeys(_PER_ROW, none.astype(np.int32)),
            completion_offsets=offsets_of(none),
            mismatched_tokens=np.empty((0, num_partners), np.int32),
        )
        groups = [np.diff(table.group_offsets) for table in tables]
        sizes = RowSizes.concat([no_rows, *(table.sizes for table in tables)])
        return RowTable(offsets_of(np.concatenate([none, *groups])), sizes)
