"""The index of a cache, from one pass: kinds and lengths of its rows, and their split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.cache import Manifest, StoredKind
from ...schemas.errors import CorruptionError
from ...schemas.rows import Role, joined_ranges, offsets_of
from ..storage.cache_folder import CacheFolder
from ..storage.local_copies import fetched_ahead
from ..storage.shards import iter_row_groups, list_column, number_column
from ..storage.verify_cache import check_before_reading
from .conversions import Reading
from .row_selection import KindCounts, Selection, context_lengths, select

COLUMNS = ("prompt_tokens", "split_key", "role", "num_tokens", "score")
SCORES = "scores"  # among what is missing; no column of the data has this name


@dataclass(frozen=True)
class GroupPlace:
    """Where a row group is stored."""

    unit: int
    group: int  # within the shard


@dataclass(frozen=True)
class Index:
    """Every row of a cache that a method reads."""

    places: tuple[GroupPlace, ...]  # of all row groups; both tables count through them
    train: RowTable
    held_out: RowTable
    kinds: dict[StoredKind, KindCounts]  # of the cache, read or not
    desirable: int  # branches of training rows that are chosen or desirable
    undesirable: int  # those that are rejected or undesirable
    missing: dict[str, int]  # rows that are read and lack what is needed of them, by its name
    levels: int  # mismatched partners of each branch in the cache
    longest: int  # most tokens of a prompt and one completion after it, as the method reads them


def build_index(
    folder: CacheFolder, manifest: Manifest, reading: Reading, *, checks_bytes: bool
) -> Index:
    """Streams every shard once; a damaged one is a CorruptionError that names its unit."""
    found = _Found()
    paths = fetched_ahead(map(folder.shard, manifest.shards))
    for shard, path in zip(manifest.shards, paths, strict=True):
        if checks_bytes:
            check_before_reading(folder, shard)
        with naming_unit(shard.unit):
            columns = (*COLUMNS, *reading.columns)
            groups = iter_row_groups(path, columns)
            for number, group in enumerate(groups):
                found.add(
                    GroupPlace(shard.unit, number), read_group(group, reading, str(folder.root))
                )
    return found.index(reading)


@contextmanager
def naming_unit(unit: int) -> Iterator[None]:
    """Adds the unit's number to the message of a damaged file."""
    try:
        yield
    except CorruptionError as error:
        raise CorruptionError(f"unit {unit}: {error}") from error


@dataclass(frozen=True)
class GroupRows:
    """The rows of one row group that a method reads."""

    table: RowTable
    is_held_out: NDArray[np.bool_]  # (rows,)
    kinds: dict[StoredKind, KindCounts]
    num_chosen: NDArray[np.int32]  # (rows,) chosen or desirable branches
    num_rejected: NDArray[np.int32]  # (rows,) rejected or undesirable ones
    missing: dict[str, int]
    levels: int
    longest: int


def read_group(group: pa.Table, reading: Reading, source: str) -> GroupRows:
    """Reads the columns of one row group; the table may be a slice of another."""
    prompt_lengths, keys = (number_column(group, name) for name in ("prompt_tokens", "split_key"))
    tokens, roles = list_column(group, "num_tokens"), list_column(group, "role")
    scores = list_column(group, "score")
    if not all(np.array_equal(roles.offsets, other.offsets) for other in (tokens, scores)):
        raise CorruptionError(f"{source} has lists over branches of different lengths.")
    picked = select(roles.values, scores.values, roles.offsets, reading=reading, source=source)
    lengths, offsets = tokens.values[picked.own], picked.branch_offsets
    is_chosen = np.isin(picked.roles, (Role.CHOSEN, Role.DESIRABLE))
    is_rejected = np.isin(picked.roles, (Role.REJECTED, Role.UNDESIRABLE))
    prompt_tokens = prompt_lengths[picked.rows] + context_lengths(picked, reading)
    mismatched = tokens.values[picked.mismatched]
    table = RowTable(
        group_offsets=np.array([0, len(picked.rows)]),
        places=np.arange(len(picked.rows), dtype=np.int32),
        prompt_tokens=prompt_tokens.astype(np.int32),
        own_tokens=_sums(lengths, offsets),
        chosen_tokens=_sums(lengths * is_chosen, offsets),
        branch_offsets=offsets,
        mismatched_tokens=mismatched if reading.mismatched else mismatched[:, :0],
    )
    return GroupRows(
        table,
        held_out(keys, reading.eval_fraction)[picked.rows],
        picked.kinds,
        _sums(is_chosen, offsets),
        _sums(is_rejected, offsets),
        _missing(group, picked, reading),
        mismatched.shape[1],
        _longest(table, lengths),
    )


def _longest(table: RowTable, lengths: NDArray[np.int32]) -> int:
    """The length of the longest prompt with one of its branches, mismatched ones included."""
    prompts = np.repeat(table.prompt_tokens, np.diff(table.branch_offsets))
    behind = np.column_stack([lengths, table.mismatched_tokens]).max(axis=1, initial=0)
    return int((prompts + behind).max(initial=0))


def _missing(group: pa.Table, picked: Selection, reading: Reading) -> dict[str, int]:
    """How many rows lack a number that the method needs, by column."""
    missing = {}
    if reading.needs_scores:
        branches = ~np.isfinite(picked.scores)
        lacking = np.repeat(picked.rows, np.diff(picked.branch_offsets))[branches]
        missing[SCORES] = len(np.unique(lacking))
    read = np.unique(picked.rows)
    for name in reading.columns:
        values = number_column(group, name)[read]
        missing[name] = int((~np.isfinite(values)).sum())
    return missing


@dataclass
class _Found:
    places: list[GroupPlace] = field(default_factory=list)
    train: list[RowTable] = field(default_factory=list)
    held_out: list[RowTable] = field(default_factory=list)
    kinds: dict[StoredKind, KindCounts] = field(default_factory=dict)
    desirable: int = 0
    undesirable: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    levels: set[int] = field(default_factory=set)
    longest: int = 0

    def add(self, place: GroupPlace, rows: GroupRows) -> None:
        self.places.append(place)
        for kind, counts in rows.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, KindCounts()) + counts
        self.missing.update(rows.missing)
        self.levels.add(rows.levels)
        self.longest = max(self.longest, rows.longest)
        if len(self.levels) > 1:
            raise CorruptionError(
                f"row group {place.group} has {rows.levels} mismatched completions a branch, "
                "those before it another number. Make the cache again."
            )
        self.train.append(rows.table.within_group(np.flatnonzero(~rows.is_held_out)))
        self.held_out.append(rows.table.within_group(np.flatnonzero(rows.is_held_out)))
        self.desirable += int(rows.num_chosen[~rows.is_held_out].sum())
        self.undesirable += int(rows.num_rejected[~rows.is_held_out].sum())

    def index(self, reading: Reading) -> Index:
        levels = max(self.levels, default=0)
        kept = levels if reading.mismatched else 0
        return Index(
            tuple(self.places),
            RowTable.concat(self.train, levels=kept),
            RowTable.concat(self.held_out, levels=kept),
            self.kinds,
            self.desirable,
            self.undesirable,
            dict(self.missing),
            levels,
            self.longest,
        )


def _sums(values: NDArray[np.generic], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """The sum of each row's branches."""
    return np.diff(offsets_of(values)[offsets]).astype(np.int32)


@dataclass(frozen=True)
class RowTable:
    """24 bytes a row and 4 a mismatched branch; rows are numbered as they are stored."""

    group_offsets: NDArray[np.int64]  # (row groups + 1,) into the rows
    places: NDArray[np.int32]  # (rows,) each among what its row group is read as
    prompt_tokens: NDArray[np.int32]  # (rows,)
    own_tokens: NDArray[np.int32]  # (rows,) of completions
    chosen_tokens: NDArray[np.int32]  # (rows,) of chosen or desirable ones among them
    branch_offsets: NDArray[np.int64]  # (rows + 1,) into the own branches
    mismatched_tokens: NDArray[np.int32]  # (branches, levels)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def levels(self) -> int:
        """How many mismatched partners each branch has."""
        return int(self.mismatched_tokens.shape[1])

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return sum(column.nbytes for column in vars(self).values())

    def group_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row group each row is stored in."""
        return np.searchsorted(self.group_offsets, rows, side="right") - 1

    def num_branches(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many own branches each row has."""
        return self.branch_offsets[rows + 1] - self.branch_offsets[rows]

    def within_group(self, rows: NDArray[np.int64]) -> RowTable:
        """The rows at `rows` of a table of one row group."""
        counts = self.num_branches(rows)
        branches = joined_ranges(self.branch_offsets[rows], counts)
        return RowTable(
            group_offsets=np.array([0, len(rows)]),
            places=self.places[rows],
            prompt_tokens=self.prompt_tokens[rows],
            own_tokens=self.own_tokens[rows],
            chosen_tokens=self.chosen_tokens[rows],
            branch_offsets=offsets_of(counts),
            mismatched_tokens=self.mismatched_tokens[branches],
        )

    @staticmethod
    def concat(tables: Sequence[RowTable], *, levels: int) -> RowTable:
        """Joins the tables of consecutive row groups; there may be none."""

        def joined(columns: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
            return np.concatenate([np.empty(0, dtype=np.int32), *columns])

        none = np.empty(0, dtype=np.int64)
        sizes = [np.diff(table.group_offsets) for table in tables]
        counts = [np.diff(table.branch_offsets) for table in tables]
        return RowTable(
            group_offsets=offsets_of(np.concatenate([none, *sizes])),
            places=joined([table.places for table in tables]),
            prompt_tokens=joined([table.prompt_tokens for table in tables]),
            own_tokens=joined([table.own_tokens for table in tables]),
            chosen_tokens=joined([table.chosen_tokens for table in tables]),
            branch_offsets=offsets_of(np.concatenate([none, *counts])),
            mismatched_tokens=np.concatenate(
                [np.empty((0, levels), np.int32), *(table.mismatched_tokens for table in tables)]
            ),
        )


def held_out(split_keys: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Splits by the prompt's own key, so a prompt is on the same side in every cache.

    Prompts that differ in nothing but white space, the system message, tools and options of the
    template have one key.
    """
    if fraction in {0.0, 1.0}:
        return np.full(len(split_keys), fraction == 1.0)
    return split_keys < np.uint64(int(fraction * 2**64))
