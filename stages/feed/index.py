"""One pass over a cache: what its rows are, how long, and on which side of the split."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.errors import CorruptionError
from ...schemas.rows import Role, offsets_of
from ..storage.shard_columns import list_column, number_column
from ..storage.shards import iter_row_groups
from ..storage.verify_cache import check_shard
from .as_read import context_lengths
from .held_out import held_out
from .row_table import RowTable
from .selection import KindCounts, select

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from ...schemas.cache import Manifest
    from ..storage.cache_folder import CacheFolder
    from .conversions import StoredKind
    from .reading import Reading
    from .selection import Selection

COLUMNS = ("prompt_tokens", "split_key", "role", "num_tokens", "score")
SCORES = "scores"  # among what is missing; no column of the data has this name


@dataclass(frozen=True)
class Place:
    """Where a row group is stored."""

    unit: int
    group: int  # within the shard


@dataclass(frozen=True)
class Index:
    """Every row of a cache that a method reads."""

    places: tuple[Place, ...]  # of all row groups; both tables count through them
    train: RowTable
    held_out: RowTable
    kinds: dict[StoredKind, KindCounts]  # of the cache, read or not
    desirable: int  # branches of training rows that are chosen or desirable
    undesirable: int  # those that are rejected or undesirable
    missing: dict[str, int]  # rows that are read and lack what is needed of them, by its name
    levels: int  # mismatched partners of each branch in the cache
    longest: int  # most tokens of a prompt and one completion behind it, as the method reads them


def build_index(
    folder: CacheFolder, manifest: Manifest, reading: Reading, *, checks_bytes: bool
) -> Index:
    """Streams every shard once; a damaged one is a CorruptionError that names its unit."""
    found = _Found()
    for shard in manifest.shards:
        if checks_bytes:
            check_shard(folder, shard)
        with naming_unit(shard.unit):
            columns = (*COLUMNS, *reading.columns)
            groups = iter_row_groups(folder.data / shard.file, columns)
            for number, group in enumerate(groups):
                found.add(Place(shard.unit, number), read_group(group, reading, str(folder.root)))
    return found.index(reading)


@contextmanager
def naming_unit(unit: int) -> Iterator[None]:
    """Puts the unit's number before what is said of a damaged file."""
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
    """What the columns of one row group say; the table may be a slice of another."""
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
    """Of all branches that are read, mismatched ones too, each behind the prompt of its row."""
    prompts = np.repeat(table.prompt_tokens, np.diff(table.branch_offsets))
    behind = np.column_stack([lengths, table.mismatched_tokens]).max(axis=1, initial=0)
    return int((prompts + behind).max(initial=0))


def _missing(group: pa.Table, picked: Selection, reading: Reading) -> dict[str, int]:
    """Stored rows that are read and have no number where the method needs one."""
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
    places: list[Place] = field(default_factory=list)
    train: list[RowTable] = field(default_factory=list)
    held_out: list[RowTable] = field(default_factory=list)
    kinds: dict[StoredKind, KindCounts] = field(default_factory=dict)
    desirable: int = 0
    undesirable: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    levels: set[int] = field(default_factory=set)
    longest: int = 0

    def add(self, place: Place, rows: GroupRows) -> None:
        self.places.append(place)
        for kind, counts in rows.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, KindCounts()) + counts
        self.missing.update(rows.missing)
        self.levels.add(rows.levels)
        self.longest = max(self.longest, rows.longest)
        if len(self.levels) > 1:
            raise CorruptionError(
                f"row group {place.group} has {rows.levels} mismatched completions a branch, "
                "those before it another number. Make the cache anew."
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
