"""The index of a cache, from one pass: kinds and lengths of its rows, and their split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...schemas.batches import StepSize
from ...schemas.cache import Manifest, Shard, StoredKind
from ...schemas.columns import (
    arrow_column,
    joined_ranges,
    list_column,
    number_column,
    offsets_of,
)
from ...schemas.errors import CorruptionError
from ...schemas.rows import Role
from ..storage.cache import Cache
from ..storage.shards import TURNS, learned_tokens, read_columns
from .conversions import ReadSpec
from .file_weights import Draws, weights_of
from .prompt_split import held_out as is_held_out
from .row_selection import KindCounts, Selection, context_lengths, select

COLUMNS = ("prompt_tokens", "split_key", "role", "num_tokens", "score")
SOURCE = "source"  # the data file of a row, and its number there
SCORES = "scores"  # the key of missing scores; no column of the data has this name


@dataclass(frozen=True)
class GroupLocation:
    """The shard, by its place in the manifest, and the index of a stored row group."""

    shard: int
    group: int  # within the shard


@dataclass(frozen=True)
class Index:
    """Every row of a cache that a method reads."""

    group_locations: tuple[GroupLocation, ...]  # by the row group numbers of both tables
    train: RowTable
    held_out: RowTable
    kinds: dict[StoredKind, KindCounts]  # of the cache, read or not
    desirable: int  # branches of an epoch's rows that are chosen or desirable
    undesirable: int  # those that are rejected or undesirable
    missing: dict[str, int]  # rows that are read and lack a needed value, by its name
    num_partners: int  # mismatched partners of each branch in the cache
    longest: int  # most tokens of a prompt and one completion after it, as the method reads them


Check: TypeAlias = Callable[[Cache, Shard], None]


def unchecked(_: Cache, __: Shard) -> None:
    """No check, for a process on whose machine another one checks the shards."""


class ShardColumns:
    """The narrow columns of shards, each shard checked before it is first read."""

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


def build_index(folder: Cache, manifest: Manifest, spec: ReadSpec, columns: ShardColumns) -> Index:
    """The index of a cache, from the narrow columns of its shards; damage names the unit."""
    weights = weights_of(manifest.inputs, spec.file_weights) if spec.file_weights else ()
    names = [f"{entry.identity:016x}" for entry in manifest.inputs] if weights else []
    source = (SOURCE,) if weights else ()
    locations: list[GroupLocation] = []
    train: list[RowTable] = []
    held_out: list[RowTable] = []
    kinds: dict[StoredKind, KindCounts] = {}
    missing: Counter[str] = Counter()
    files: list[NDArray[np.int16]] = []  # of training rows
    labels = np.zeros((2, max(1, len(weights))))  # chosen and rejected branches of each file
    partners, longest = set[int](), 0
    for place, shard in enumerate(manifest.shards):  # an empty key range has none
        table, sizes = columns.read(folder, shard, (*COLUMNS, TURNS, *source, *spec.columns))
        rows = read_table(table, sizes, spec, str(folder.root))
        partners.add(rows.num_partners)
        if len(partners) > 1:
            raise CorruptionError(
                f"it has {rows.num_partners} mismatched completions a branch, and the shards "
                "before it another number. Make the cache again."
            )
        file_of = _files(table, names) if weights else np.zeros(len(table), np.int16)
        is_learned = ~rows.is_held_out
        learned = file_of[rows.stored][is_learned]
        for label, counts in enumerate((rows.num_chosen, rows.num_rejected)):
            count = len(labels[label])
            labels[label] += np.bincount(learned, weights=counts[is_learned], minlength=count)
        if weights:
            files.append(learned)
        locations += [GroupLocation(place, group) for group in range(len(sizes))]
        train.append(rows.table.keep(is_learned))
        held_out.append(rows.table.keep(rows.is_held_out))
        for kind, of_kind in rows.kinds.items():
            kinds[kind] = kinds.get(kind, KindCounts()) + of_kind
        missing.update(rows.missing)
        longest = max(longest, rows.longest)

    num_partners = max(partners, default=0)
    kept = num_partners if spec.mismatched else 0
    whole, share = RowTable.concat(train, num_partners=kept), np.ones(labels.shape[1])
    if files:
        draws = Draws.of(np.concatenate(files), weights)
        whole = replace(whole, draws=draws)
        # Of so many draws as an epoch has of each file: a file's rows are drawn alike.
        in_file = np.bincount(draws.file_of, minlength=len(weights))
        share = np.array(draws.per_epoch) / np.maximum(in_file, 1)
    desirable, undesirable = map(round, (labels @ share).tolist())
    return Index(
        group_locations=tuple(locations),
        train=whole,
        held_out=RowTable.concat(held_out, num_partners=kept),
        kinds=kinds,
        desirable=desirable,
        undesirable=undesirable,
        missing=dict(missing),
        num_partners=num_partners,
        longest=longest,
    )


@dataclass(frozen=True)
class TableRows:
    """The rows of some row groups that a method reads."""

    table: RowTable
    is_held_out: NDArray[np.bool_]  # (rows,)
    kinds: dict[StoredKind, KindCounts]
    num_chosen: NDArray[np.int32]  # (rows,) chosen or desirable branches
    num_rejected: NDArray[np.int32]  # (rows,) rejected or undesirable ones
    missing: dict[str, int]
    num_partners: int
    longest: int
    stored: NDArray[np.int64]  # (rows,) index of the row of the columns that each is made of


def read_table(
    columns: pa.Table, sizes: NDArray[np.int64], spec: ReadSpec, source: str
) -> TableRows:
    """The rows of columns of row groups of these sizes; the table may be a slice of another."""
    prompt_lengths, keys = (number_column(columns, name) for name in ("prompt_tokens", "split_key"))
    tokens, roles = list_column(columns, "num_tokens"), list_column(columns, "role")
    scores = list_column(columns, "score")
    if not all(np.array_equal(roles.offsets, other.offsets) for other in (tokens, scores)):
        raise CorruptionError(f"{source} has lists over branches of different lengths.")
    picked = select(
        roles.values, scores.values, roles.offsets, spec=spec, source=source, split_keys=keys
    )
    offsets = picked.branch_offsets
    is_chosen = np.isin(picked.roles, (Role.CHOSEN, Role.DESIRABLE))
    is_rejected = np.isin(picked.roles, (Role.REJECTED, Role.UNDESIRABLE))
    group_of = np.repeat(np.arange(len(sizes)), sizes)[picked.rows]
    group_offsets = offsets_of(np.bincount(group_of, minlength=len(sizes)))
    partners = picked.mismatched if spec.mismatched else picked.mismatched[:, :0]
    branches = np.column_stack([picked.own, partners])
    lengths = tokens.values[branches]
    learned = learned_tokens(columns)[picked.own]
    read = RowSizes.of(
        np.arange(len(picked.rows)) - group_offsets[group_of],
        prompt_lengths[picked.rows] + context_lengths(picked, spec),
        lengths,
        learned,
        is_chosen,
        offsets,
    )
    longest = np.repeat(read.prompt_tokens, np.diff(offsets)) + lengths.max(axis=1, initial=0)
    return TableRows(
        RowTable(group_offsets, read),
        is_held_out(keys, spec.eval_fraction)[picked.rows],
        picked.kinds,
        _sums(is_chosen, offsets),
        _sums(is_rejected, offsets),
        _missing(columns, picked, spec),
        num_partners=picked.mismatched.shape[1],
        longest=int(longest.max(initial=0)),
        stored=picked.rows,
    )


def _files(columns: pa.Table, names: Sequence[str]) -> NDArray[np.int16]:
    """The index of each row's data file among the names that rows give their files."""
    file = arrow_column(columns, SOURCE).field("file")
    found = pc.index_in(file, value_set=pa.array(names, file.type))
    if found.null_count:
        raise CorruptionError("it has rows of a data file that the manifest does not list.")
    files: NDArray[np.int16] = found.to_numpy().astype(np.int16)
    return files


def _missing(columns: pa.Table, picked: Selection, spec: ReadSpec) -> dict[str, int]:
    """Counts of the rows that lack a number that the method needs, by column."""
    missing = {}
    if spec.needs_scores:
        branches = ~np.isfinite(picked.scores)
        lacking = np.repeat(picked.rows, np.diff(picked.branch_offsets))[branches]
        missing[SCORES] = len(np.unique(lacking))
    read = np.unique(picked.rows)
    for name in spec.columns:
        values = number_column(columns, name)[read]
        missing[name] = int((~np.isfinite(values)).sum())
    return missing


def _sums(values: NDArray[np.generic], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """The sum of each row's branches."""
    return np.diff(offsets_of(values)[offsets]).astype(np.int32)


_PER_ROW = ("index_in_group", "prompt_tokens", "own_tokens", "learned_tokens", "chosen_tokens")


@dataclass(frozen=True)
class RowSizes:
    """Lengths of rows: 28 bytes a row, 4 a mismatched branch."""

    index_in_group: NDArray[np.int32]  # (rows,) of the row group as it is read
    prompt_tokens: NDArray[np.int32]  # (rows,)
    own_tokens: NDArray[np.int32]  # (rows,) of completions
    learned_tokens: NDArray[np.int32]  # (rows,) those of them that are learned
    chosen_tokens: NDArray[np.int32]  # (rows,) learned, of chosen or desirable ones
    branch_offsets: NDArray[np.int64]  # (rows + 1,) into the own branches
    mismatched_tokens: NDArray[np.int32]  # (branches, partners)

    @staticmethod
    def of(
        index_in_group: NDArray[np.int64],
        prompt_tokens: NDArray[np.int64],
        tokens: NDArray[np.int32],  # (branches, 1 + partners) of own completions, then mismatched
        learned: NDArray[np.int32],  # (branches,) those of own completions that are learned
        is_chosen: NDArray[np.bool_],  # (branches,)
        branch_offsets: NDArray[np.int64],
    ) -> RowSizes:
        """The lengths of rows, of those of their completions."""
        return RowSizes(
            index_in_group=index_in_group.astype(np.int32),
            prompt_tokens=prompt_tokens.astype(np.int32),
            own_tokens=_sums(tokens[:, 0], branch_offsets),
            learned_tokens=_sums(learned, branch_offsets),
            chosen_tokens=_sums(learned * is_chosen, branch_offsets),
            branch_offsets=branch_offsets,
            mismatched_tokens=tokens[:, 1:],
        )

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def take(self, rows: NDArray[np.int64]) -> RowSizes:
        """The lengths of these rows."""
        counts = np.diff(self.branch_offsets)[rows]
        branches = joined_ranges(self.branch_offsets[rows], counts)
        per_row = {name: getattr(self, name)[rows] for name in _PER_ROW}
        return RowSizes(
            **per_row,
            branch_offsets=offsets_of(counts),
            mismatched_tokens=self.mismatched_tokens[branches],
        )

    @staticmethod
    def concat(parts: Sequence[RowSizes]) -> RowSizes:
        """The lengths of the rows of several, in order."""
        joined = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in (*_PER_ROW, "mismatched_tokens")
        }
        counts = np.concatenate([np.diff(part.branch_offsets) for part in parts])
        return RowSizes(**joined, branch_offsets=offsets_of(counts))

    def tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of each of these rows, with its own completions."""
        return self.prompt_tokens[rows].astype(np.int64) + self.own_tokens[rows]


@dataclass(frozen=True)
class RowTable:
    """Lengths of rows, numbered as they are stored."""

    group_offsets: NDArray[np.int64]  # (row groups + 1,) into the rows
    sizes: RowSizes
    draws: Draws | None = None  # of an epoch; None: every row once

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def rows_per_epoch(self) -> int:
        """The number of rows that an epoch draws, a row counted as often as it is drawn."""
        return len(self) if self.draws is None else len(self.draws)

    @property
    def num_partners(self) -> int:
        """The number of mismatched partners of each branch."""
        return int(self.sizes.mismatched_tokens.shape[1])

    @property
    def nbytes(self) -> int:
        """Its bytes in memory."""
        return sum(each.nbytes for each in (self.group_offsets, *vars(self.sizes).values()))

    def group_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the row group that each row is stored in."""
        return np.searchsorted(self.group_offsets, rows, side="right") - 1

    def num_branches(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of own branches of each row."""
        return self.sizes.branch_offsets[rows + 1] - self.sizes.branch_offsets[rows]

    def size_of(self, rows: NDArray[np.int64]) -> StepSize:
        """The size of a step of these rows."""
        return StepSize(
            rows=len(rows),
            branches=int(self.num_branches(rows).sum()),
            tokens=int(self.sizes.learned_tokens[rows].sum(dtype=np.int64)),
            chosen_tokens=int(self.sizes.chosen_tokens[rows].sum(dtype=np.int64)),
        )

    def keep(self, kept: NDArray[np.bool_]) -> RowTable:
        """The rows where `kept`, in the same row groups."""
        return RowTable(offsets_of(kept)[self.group_offsets], self.sizes.take(np.flatnonzero(kept)))

    @staticmethod
    def concat(tables: Sequence[RowTable], *, num_partners: int) -> RowTable:
        """The tables of consecutive row groups as one; there may be none."""
        none = np.empty(0, dtype=np.int64)
        no_tokens = np.empty((0, 1 + num_partners), "i4")
        no_rows = RowSizes.of(none, none, no_tokens, no_tokens[:, 0], none > 0, offsets_of(none))
        groups = [np.diff(table.group_offsets) for table in tables]
        sizes = RowSizes.concat([no_rows, *(table.sizes for table in tables)])
        return RowTable(offsets_of(np.concatenate([none, *groups])), sizes)
