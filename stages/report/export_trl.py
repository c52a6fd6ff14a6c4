"""A cache as one flat table, its columns named as TRL's trainers name them.

Each `..._ids` column comes with the text it decodes to: text can be tokenized differently
elsewhere, ids cannot. The second and later mismatches of a completion get a number after their
name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.cache import Manifest, StoredKind, branch_layout
from ...schemas.columns import offsets_of
from ...schemas.errors import CorruptionError, UsageError
from ...schemas.rows import Role
from ..storage.cache import Cache
from ..storage.disk import fs
from ..storage.shards import TURNS, carried_names, iter_row_groups, open_shard


def export_trl(folder: Cache, target: Path, *, decode: Decode, overwrite: bool = False) -> int:
    """Writes `target` atomically; returns the number of rows."""
    fs.drop_drafts(target)  # also one whose writer was killed once the file had its name
    _require_free(target, overwrite=overwrite)
    tables = _flat_tables(folder, decode)
    with fs.new_file(target, replaces=overwrite) as sink:
        return _write(sink, tables)


def _require_free(target: Path, *, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a folder. Make it, or choose another --output.")
    if target.is_dir():
        raise UsageError(f"{target} is a folder. Choose another --output.")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists. Pass --overwrite, or choose another --output.")


def scan_trl(folder: Cache, decode: Decode | None = None) -> pl.LazyFrame:
    """The same columns as a query over the manifest's shards; with text if `decode` is given.

    Only the first rows are looked at now. Rows of another kind are refused as they are read.
    """
    manifest = _require_rows(folder)
    paths = [folder.shard(shard) for shard in manifest.shards]
    for path, shard in zip(paths, manifest.shards, strict=True):
        if not path.is_file() or path.stat().st_size != shard.bytes:
            raise CorruptionError(
                f"{path} is not there as the manifest has it. Restore it from a copy, or make the "
                "cache again."
            )
    for path in paths:
        with open_shard(path) as file:
            _require_all_learned(file.schema_arrow, folder)
    first = next(group for path in paths for group in iter_row_groups(path) if len(group))
    scan = pl.scan_parquet(paths, glob=False, hive_partitioning=False)
    return _flat(scan, _layout_of(first, source=str(paths[0])), decode)


def _require_rows(folder: Cache) -> Manifest:
    manifest = folder.manifest()
    if not manifest.is_scored:
        raise UsageError(
            f"{folder.root} is not scored (cache.scored is false): it has no log-probs to export."
        )
    if not manifest.rows:
        raise UsageError(f"{folder.root} holds no rows, so there is nothing to export.")
    return manifest


def _flat_tables(folder: Cache, decode: Decode) -> Iterator[pa.Table]:
    first = None
    for shard in _require_rows(folder).shards:
        folder.check(shard)
        path = folder.shard(shard)
        for group in iter_row_groups(path):
            _require_all_learned(group.schema, folder)
            if not len(group):
                continue
            table = _flat_table(group, decode, source=str(path))
            first = first or table.schema
            if not table.schema.equals(first):
                raise CorruptionError(f"The cache of {path} {_MIXED}")
            yield table


def _flat_table(group: pa.Table, decode: Decode, *, source: str) -> pa.Table:
    layout = _layout_of(group, source=source)
    rows = pl.DataFrame(pl.from_arrow(group.select(layout.columns)))
    table = _flat(rows.lazy(), layout, decode).collect().to_arrow()
    return table.cast(pa.schema([(field.name, _plain(field.type)) for field in table.schema]))


def _require_all_learned(schema: pa.Schema, folder: Cache) -> None:
    """Refuses sums over turns: TRL's trainers compare them with sums over every token."""
    if TURNS in schema.names:
        raise UsageError(
            f"{folder.root} has completions of several messages, and its log-probs are of the "
            "assistant's turns alone. TRL's trainers sum over every token. Export a cache made "
            "with --set tokens.learn=all."
        )


def _plain(kind: pa.DataType) -> pa.DataType:
    """The Arrow type with ordinary lists and strings instead of polars' large ones."""
    if pa.types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    return pa.string() if pa.types.is_large_string(kind) else kind


def _write(sink: BinaryIO, tables: Iterator[pa.Table]) -> int:
    num_rows = 0
    with ExitStack() as stack:
        writer = None
        for table in tables:
            if writer is None:
                opened = pq.ParquetWriter(sink, table.schema, compression="zstd")
                writer = stack.enter_context(opened)
            writer.write_table(table)
            num_rows += len(table)
    return num_rows


class Decode(Protocol):
    """A decoder of token ids to text."""

    def __call__(self, lists: Sequence[Sequence[int]], *, continues: bool) -> list[str]:
        """The texts; `continues`: the ids follow a prompt, so a leading blank is kept."""
        ...


_MIXED = "holds different kinds of rows. Make the cache again."


@dataclass(frozen=True)
class Layout:
    """The layout of the branches of each row in the columns of a shard."""

    kind: StoredKind
    levels: int  # mismatched partners of each own branch
    carried: tuple[str, ...]

    @property
    def columns(self) -> list[str]:
        """The columns of a shard that are read."""
        own = ("row_id", "prompt_ids", "prompt_cut", *self.carried)
        return [*own, "completion_ids", "role", "score", "cut", "ref_logp"]


def _layout_of(group: pa.Table, *, source: str) -> Layout:
    roles = pl.Series(pl.from_arrow(group.column("role")))
    kind, levels = _kind_and_levels(roles, source)
    return Layout(kind, levels, tuple(carried_names(group.schema)))


def _kind_and_levels(roles: pl.Series, source: str) -> tuple[StoredKind, int]:
    offsets = offsets_of(roles.list.len().to_numpy())
    stored = branch_layout(roles.explode().to_numpy(), offsets, source=source)
    if (stored.kinds != stored.kinds[0]).any():
        raise CorruptionError(f"{source} {_MIXED}")
    return StoredKind(stored.kinds[0]), stored.num_partners


def _flat(shards: pl.LazyFrame, layout: Layout, decode: Decode | None) -> pl.LazyFrame:
    """The rows in the other trainer's format; each labelled completion becomes a row."""
    check = partial(_require_layout, layout=layout)
    roles = pl.col("role").map_batches(check, return_dtype=pl.List(pl.Int8), is_elementwise=True)
    columns = [
        pl.col("row_id"),
        *_with_text("prompt", "prompt_ids", pl.col("prompt_ids"), decode, continues=False),
        *map(pl.col, ("prompt_cut", *layout.carried)),
    ]
    if layout.kind == StoredKind.PAIRED:
        return shards.with_columns(roles).select(*columns, *_paired(layout, decode))
    own = shards.with_columns(roles).with_columns(_by_level(layout))
    if layout.kind == StoredKind.SCORED:
        return own.select(*columns, *_scored(layout, decode))
    lists = [name for level in range(layout.levels + 1) for name in _of_level(level)]
    return own.explode(lists).select(*columns, *_unpaired(layout, decode))


def _require_layout(roles: pl.Series, *, layout: Layout) -> pl.Series:
    known = (layout.kind, layout.levels)
    if len(roles) and _kind_and_levels(roles, "This cache") != known:
        raise CorruptionError(f"This cache {_MIXED}")
    return roles


def _paired(layout: Layout, decode: Decode | None) -> Iterator[pl.Expr]:
    for name, role in (("chosen", Role.CHOSEN), ("rejected", Role.REJECTED)):
        is_first = pl.col("role").list.get(0) == int(role)
        for level in range(layout.levels + 1):
            index = pl.when(is_first).then(2 * level).otherwise(2 * level + 1)
            ids, cut, logps = (
                pl.col(column).list.get(index) for column in ("completion_ids", "cut", "ref_logp")
            )
            kl, suffix = _level_names(level)
            text = f"{kl}{name}"
            yield from _with_text(text + suffix, f"{text}_ids{suffix}", ids, decode)
            yield cut.alias(f"{text}{suffix}_cut")
            yield logps.alias(f"ref_{name}_{kl}logps{suffix}")


def _unpaired(layout: Layout, decode: Decode | None) -> Iterator[pl.Expr]:
    for level in range(layout.levels + 1):
        ids, cut, logps, role, _ = map(pl.col, _of_level(level))
        kl, suffix = _level_names(level)
        text = f"{kl}completion"
        yield from _with_text(text + suffix, f"{text}_ids{suffix}", ids, decode)
        yield cut.alias(f"{text}{suffix}_cut")
        if not level:
            yield (role == int(Role.DESIRABLE)).alias("label")
        yield logps.alias(f"ref_{kl}logps{suffix}")


def _scored(layout: Layout, decode: Decode | None) -> Iterator[pl.Expr]:
    for level in range(layout.levels + 1):
        ids, cut, logps, _, scores = map(pl.col, _of_level(level))
        kl, suffix = _level_names(level)
        name = f"{kl}completions{suffix}"
        yield from _with_text(name, f"{kl}completion_ids{suffix}", ids, decode, depth=2)
        yield cut.alias(f"{name}_cut")
        if not level:
            yield scores.alias("scores")
        yield logps.alias(f"ref_{kl}logps{suffix}")


BRANCH_COLUMNS = ("completion_ids", "cut", "ref_logp", "role", "score")


def _of_level(level: int) -> list[str]:
    """Names of the columns of the k-th mismatches of own branches; 0: the branches themselves."""
    return [f"{name}/{level}" for name in BRANCH_COLUMNS]


def _by_level(layout: Layout) -> Iterator[pl.Expr]:
    num_own = pl.col("role").list.len() // (layout.levels + 1)
    for level in range(layout.levels + 1):
        for name, alias in zip(BRANCH_COLUMNS, _of_level(level), strict=True):
            yield pl.col(name).list.slice(num_own * level, num_own).alias(alias)


def _level_names(level: int) -> tuple[str, str]:
    """The prefix and suffix of a column's name: `KL_` of mismatches, `_2` of second ones."""
    return ("KL_" if level else "", f"_{level}" if level > 1 else "")


def _with_text(
    text_name: str,
    ids_name: str,
    ids: pl.Expr,
    decode: Decode | None,
    *,
    continues: bool = True,
    depth: int = 1,
) -> Iterator[pl.Expr]:
    """The columns of decoded text and of ids."""
    if decode is not None:
        make = partial(_decoded, decode=decode, continues=continues, depth=depth)
        kind = pl.String if depth == 1 else pl.List(pl.String)
        yield ids.map_batches(make, return_dtype=kind, is_elementwise=True).alias(text_name)
    yield ids.alias(ids_name)


def _decoded(ids: pl.Series, *, decode: Decode, continues: bool, depth: int) -> pl.Series:
    lists = ids.to_list()
    if depth == 1:
        return pl.Series(decode(lists, continues=continues), dtype=pl.String)
    texts = [decode(one, continues=continues) for one in lists]
    return pl.Series(texts, dtype=pl.List(pl.String))
