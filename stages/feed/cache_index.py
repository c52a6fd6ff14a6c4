"""The index of a cache, from one pass: kinds and lengths of its rows, and their split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.cache import Commit, Manifest, StoredKind
from ...schemas.columns import joined_ranges, offsets_of
from ...schemas.errors import CorruptionError
from ...schemas.rows import Role
from ..storage.bucket.objects import Location
from ..storage.cache.cache_folder import CacheFolder
from ..storage.cache.shards import list_column, number_column, read_columns
from ..storage.cache.verify_cache import naming_unit
from .conversions import ReadSpec
from .row_selection import KindCounts, Selection, context_lengths, select

COLUMNS = ("prompt_tokens", "split_key", "role", "num_tokens", "score")
SCORES = "scores"  # the key of missing scores; no column of the data has this name


@dataclass(frozen=True)
class GroupLocation:
    """The unit and the index of a stored row group."""

    unit: int
    group: int  # within the shard


@dataclass(frozen=True)
class Index:
    """Every row of a cache that a method reads."""

    group_locations: tuple[GroupLocation, ...]  # by the row group numbers of both tables
    train: RowTable
    held_out: RowTable
    kinds: dict[StoredKind, KindCounts]  # of the cache, read or not
    desirable: int  # branches of training rows that are chosen or desirable
    undesirable: int  # those that are rejected or undesirable
    missing: dict[str, int]  # rows that are read and lack a needed value, by its name
    num_partners: int  # mismatched partners of each branch in the cache
    longest: int  # most tokens of a prompt and one completion after it, as the method reads them


Check: TypeAlias = Callable[[CacheFolder, Commit], None]


def unchecked(_: CacheFolder, __: Commit) -> None:
    """No check, for a process on whose machine another one checks the shards."""


class ShardColumns:
    """The narrow columns of shards, each shard checked before it is first read.

    If several trainings read one cache, `keeps` caches the columns for the next of them.
    """

    def __init__(self, check: Check, *, keeps: bool = False) -> None:
        self._check = check
        self._keeps = keeps
        self._kept: dict[tuple[Location, str], tuple[pa.ChunkedArray, NDArray[np.int64]]] = {}
        self._checked: set[Location] = set()

    def read(
        self, folder: CacheFolder, shard: Commit, names: Sequence[str]
    ) -> tuple[pa.Table, NDArray[np.int64]]:
        """These columns of a shard, and the number of rows of each of its row groups."""
        path = folder.shard(shard)
        if path not in self._checked:
            self._check(folder, shard)
            self._checked.add(path)
        found = {name: self._kept[path, name] for name in names if (path, name) in self._kept}
        if missing := [name for name in names if name not in found]:
            table, sizes = read_columns(path, missing)
            found |= {name: (table.column(name), sizes) for name in missing}
        if self._keeps:
            self._kept |= {(path, name): column for name, column in found.items()}
        columns = [found[name][0] for name in names]
        return pa.Table.from_arrays(columns, names=list(names)), found[names[0]][1]


def build_index(
    folder: CacheFolder, manifest: Manifest, spec: ReadSpec, columns: ShardColumns
) -> Index:
    """The index of a cache, from the narrow columns of its shards; damage names the unit."""
    found = _Found()
    fetched = folder.store.ahead(map(folder.shard, manifest.shards))
    for shard, _ in zip(manifest.shards, fetched, strict=True):
        with naming_unit(shard.unit):
            table, sizes = columns.read(folder, shard, (*COLUMNS, *spec.columns))
            rows = read_table(table, sizes, spec, str(folder.root))
            found.add(shard.unit, rows)
    return found.index(spec)


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


def read_table(
    columns: pa.Table, sizes: NDArray[np.int64], spec: ReadSpec, source: str
) -> TableRows:
    """The rows of columns of row groups of these sizes; the table may be a slice of another."""
    prompt_lengths, keys = (number_column(columns, name) for name in ("prompt_tokens", "split_key"))
    tokens, roles = list_column(columns, "num_tokens"), list_column(columns, "role")
    scores = list_column(columns, "score")
    if not all(np.array_equal(roles.offsets, other.offsets) for other in (tokens, scores)):
        raise CorruptionError(f"{source} has lists over branches of different lengths.")
    picked = select(roles.values, scores.values, roles.offsets, spec=spec, source=source)
    lengths, offsets = tokens.values[picked.own], picked.branch_offsets
    is_chosen = np.isin(picked.roles, (Role.CHOSEN, Role.DESIRABLE))
    is_rejected = np.isin(picked.roles, (Role.REJECTED, Role.UNDESIRABLE))
    prompt_tokens = prompt_lengths[picked.rows] + context_lengths(picked, spec)
    mismatched = tokens.values[picked.mismatched]
    group_of = np.repeat(np.arange(len(sizes)), sizes)[picked.rows]
    group_offsets = offsets_of(np.bincount(group_of, minlength=len(sizes)))
    index_in_group = np.arange(len(picked.rows)) - group_offsets[group_of]
    table = RowTable(
        group_offsets=group_offsets,
        index_in_group=index_in_group.astype(np.int32),
        prompt_tokens=prompt_tokens.astype(np.int32),
        own_tokens=_sums(lengths, offsets),
        chosen_tokens=_sums(lengths * is_chosen, offsets),
        branch_offsets=offsets,
        mismatched_tokens=mismatched if spec.mismatched else mismatched[:, :0],
    )
    return TableRows(
        table,
        held_out(keys, spec.eval_fraction)[picked.rows],
        picked.kinds,
        _sums(is_chosen, offsets),
        _sums(is_rejected, offsets),
        _missing(columns, picked, spec),
        mismatched.shape[1],
        _longest(table, lengths),
    )


def _longest(table: RowTable, lengths: NDArray[np.int32]) -> int:
    """The length of the longest prompt with one of its branches, mismatched ones included."""
    prompts = np.repeat(table.prompt_tokens, np.diff(table.branch_offsets))
    completions = np.column_stack([lengths, table.mismatched_tokens]).max(axis=1, initial=0)
    return int((prompts + completions).max(initial=0))


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


@dataclass
class _Found:
    group_locations: list[GroupLocation] = field(default_factory=list)
    train: list[RowTable] = field(default_factory=list)
    held_out: list[RowTable] = field(default_factory=list)
    kinds: dict[StoredKind, KindCounts] = field(default_factory=dict)
    desirable: int = 0
    undesirable: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    num_partners: set[int] = field(default_factory=set)
    longest: int = 0

    def add(self, unit: int, rows: TableRows) -> None:
        groups = len(rows.table.group_offsets) - 1
        self.group_locations += [GroupLocation(unit, group) for group in range(groups)]
        for kind, counts in rows.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, KindCounts()) + counts
        self.missing.update(rows.missing)
        self.num_partners.add(rows.num_partners)
        self.longest = max(self.longest, rows.longest)
        if len(self.num_partners) > 1:
            raise CorruptionError(
                f"it has {rows.num_partners} mismatched completions a branch, and the shards "
                "before it another number. Make the cache again."
            )
        self.train.append(rows.table.keep(~rows.is_held_out))
        self.held_out.append(rows.table.keep(rows.is_held_out))
        self.desirable += int(rows.num_chosen[~rows.is_held_out].sum())
        self.undesirable += int(rows.num_rejected[~rows.is_held_out].sum())

    def index(self, spec: ReadSpec) -> Index:
        num_partners = max(self.num_partners, default=0)
        kept = num_partners if spec.mismatched else 0
        return Index(
            tuple(self.group_locations),
            RowTable.concat(self.train, num_partners=kept),
            RowTable.concat(self.held_out, num_partners=kept),
            self.kinds,
            self.desirable,
            self.undesirable,
            dict(self.missing),
            num_partners,
            self.longest,
        )


def _sums(values: NDArray[np.generic], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """The sum of each row's branches."""
    return np.diff(offsets_of(values)[offsets]).astype(np.int32)


@dataclass(frozen=True)
class RowTable:
    """Lengths of rows, numbered as they are stored: 24 bytes a row, 4 a mismatched branch."""

    group_offsets: NDArray[np.int64]  # (row groups + 1,) into the rows
    index_in_group: NDArray[np.int32]  # (rows,) of the row in its row group as it is read
    prompt_tokens: NDArray[np.int32]  # (rows,)
    own_tokens: NDArray[np.int32]  # (rows,) of completions
    chosen_tokens: NDArray[np.int32]  # (rows,) of chosen or desirable ones among them
    branch_offsets: NDArray[np.int64]  # (rows + 1,) into the own branches
    mismatched_tokens: NDArray[np.int32]  # (branches, partners)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def num_partners(self) -> int:
        """The number of mismatched partners of each branch."""
        return int(self.mismatched_tokens.shape[1])

    @property
    def nbytes(self) -> int:
        """Its bytes in memory."""
        return sum(column.nbytes for column in vars(self).values())

    def group_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the row group that each row is stored in."""
        return np.searchsorted(self.group_offsets, rows, side="right") - 1

    def num_branches(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of own branches of each row."""
        return self.branch_offsets[rows + 1] - self.branch_offsets[rows]

    def keep(self, kept: NDArray[np.bool_]) -> RowTable:
        """The rows where `kept`, in the same row groups."""
        rows = np.flatnonzero(kept)
        counts = self.num_branches(rows)
        branches = joined_ranges(self.branch_offsets[rows], counts)
        return RowTable(
            group_offsets=offsets_of(kept)[self.group_offsets],
            index_in_group=self.index_in_group[rows],
            prompt_tokens=self.prompt_tokens[rows],
            own_tokens=self.own_tokens[rows],
            chosen_tokens=self.chosen_tokens[rows],
            branch_offsets=offsets_of(counts),
            mismatched_tokens=self.mismatched_tokens[branches],
        )

    @staticmethod
    def concat(tables: Sequence[RowTable], *, num_partners: int) -> RowTable:
        """The tables of consecutive row groups as one; there may be none."""

        def joined(columns: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
            return np.concatenate([np.empty(0, dtype=np.int32), *columns])

        none = np.empty(0, dtype=np.int64)
        sizes = [np.diff(table.group_offsets) for table in tables]
        counts = [np.diff(table.branch_offsets) for table in tables]
        return RowTable(
            group_offsets=offsets_of(np.concatenate([none, *sizes])),
            index_in_group=joined([table.index_in_group for table in tables]),
            prompt_tokens=joined([table.prompt_tokens for table in tables]),
            own_tokens=joined([table.own_tokens for table in tables]),
            chosen_tokens=joined([table.chosen_tokens for table in tables]),
            branch_offsets=offsets_of(np.concatenate([none, *counts])),
            mismatched_tokens=np.concatenate(
                [
                    np.empty((0, num_partners), np.int32),
                    *(table.mismatched_tokens for table in tables),
                ]
            ),
        )


def held_out(split_keys: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Mask of the held-out rows, by the prompt's own key: the same for a prompt in every cache.

    Prompts that differ only in white space, the system message, tools and options of the template
    have the same key.
    """
    if fraction in {0.0, 1.0}:
        return np.full(len(split_keys), fraction == 1.0)
    return split_keys < np.uint64(int(fraction * 2**64))
