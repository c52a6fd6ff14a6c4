"""Exports a cache as one table with the column names of TRL's trainers.

Each `..._ids` column is accompanied by its decoded text. The ids are exact; another tokenizer may
split the text differently. The second and later KL completions get a number after their name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.cache import StoredKind, completion_layout
from ...schemas.columns import offsets_of
from ...schemas.errors import CorruptionError, UsageError
from ...schemas.rows import Role
from ..storage.cache import Cache
from ..storage.disk import fs
from ..storage.shards import TURNS, carried_names, iter_row_groups, open_shard
from .eval_table import Decode

OF_ROWS = ("row_id", "prompt_ids", "prompt_cut")
OF_COMPLETIONS = ("completion_ids", "role", "score", "cut", "ref_logp")


@dataclass(frozen=True)
class Layout:
    """The layout of a cache's rows."""

    paths: list[Path]  # of shards
    kind: StoredKind
    num_partners: int  # KL completions per completion
    carried: list[str]  # other columns of the data


def export_trl(folder: Cache, target: Path, *, decode: Decode, overwrite: bool = False) -> int:
    """Writes the table to `target`, atomically; returns the number of rows."""
    fs.drop_drafts(target)  # first, because a killed run may have left one
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a folder. Make it, or choose another --output.")
    if target.is_dir():
        raise UsageError(f"{target} is a folder. Choose another --output.")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists. Pass --overwrite, or choose another --output.")
    layout, num_rows = _layout_of(folder), 0
    with fs.new_file(target, replaces=overwrite) as sink, ExitStack() as stack:
        writer = None
        for shard in folder.manifest().shards:
            folder.check(shard)
            for group in iter_row_groups(folder.shard(shard)):
                rows = pl.DataFrame(pl.from_arrow(group))
                table = _flat(rows.lazy(), layout, decode).collect().to_arrow()
                # Some readers do not support polars' large lists and strings.
                fields = [(field.name, _ordinary(field.type)) for field in table.schema]
                table = table.cast(pa.schema(fields))
                if writer is None:
                    opened = pq.ParquetWriter(sink, table.schema, compression="zstd")
                    writer = stack.enter_context(opened)
                writer.write_table(table)
                num_rows += len(table)
    return num_rows


def scan_trl(folder: Cache, decode: Decode | None = None) -> pl.LazyFrame:
    """The table as a lazy query over the shards; with text if `decode` is given."""
    layout = _layout_of(folder)
    shards = pl.scan_parquet(layout.paths, glob=False, hive_partitioning=False)
    return _flat(shards, layout, decode)


def _layout_of(folder: Cache) -> Layout:
    manifest = folder.manifest()
    if not manifest.is_scored:
        raise UsageError(
            f"{folder.root} is not scored (cache.scored is false), so it has no log-probs to "
            "export. Score it with `align precompute-ref`."
        )
    if not manifest.rows:
        raise UsageError(f"{folder.root} has no rows to export.")
    paths = [folder.shard(shard) for shard in manifest.shards]
    for path, shard in zip(paths, manifest.shards, strict=True):
        if not path.is_file() or path.stat().st_size != shard.bytes:
            raise CorruptionError(
                f"{path} is missing or has another size than in the manifest. Restore it from a "
                "copy, or make the cache again."
            )
        with open_shard(path) as file:
            if TURNS in file.schema_arrow.names:
                raise UsageError(
                    f"{folder.root} has completions of several messages, and its log-probs cover "
                    "only the assistant's turns, while TRL's trainers sum over all tokens. Export "
                    "a cache that was made with --set tokens.learn=all."
                )
    # All rows of a cache have the same kind and the same number of KL completions.
    first = next(iter_row_groups(paths[0]))
    roles = pl.Series(pl.from_arrow(first.column("role")))
    offsets = offsets_of(roles.list.len().to_numpy())
    stored = completion_layout(roles.explode().to_numpy(), offsets, source=str(paths[0]))
    kind = StoredKind(stored.kinds[0])
    return Layout(paths, kind, stored.num_partners, carried_names(first.schema))


def _flat(shards: pl.LazyFrame, layout: Layout, decode: Decode | None) -> pl.LazyFrame:
    """The rows with TRL's columns; each labelled completion becomes a row of its own."""
    columns = {name: pl.col(name) for name in (*OF_ROWS, *layout.carried)}
    num_own = pl.col("role").list.len() // (layout.num_partners + 1)
    levels = [
        (level, "KL_" if level else "", f"_{level}" if level > 1 else "")
        for level in range(layout.num_partners + 1)
    ]
    if layout.kind == StoredKind.PAIRED:
        for side, role in (("chosen", Role.CHOSEN), ("rejected", Role.REJECTED)):
            is_first = pl.col("role").list.get(0) == int(role)
            for level, kl, number in levels:
                index = pl.when(is_first).then(2 * level).otherwise(2 * level + 1)
                columns[f"{kl}{side}_ids{number}"] = pl.col("completion_ids").list.get(index)
                columns[f"{kl}{side}{number}_cut"] = pl.col("cut").list.get(index)
                columns[f"ref_{side}_{kl}logps{number}"] = pl.col("ref_logp").list.get(index)
        flat = shards.select(**columns)
    else:
        is_labelled = layout.kind == StoredKind.UNPAIRED
        name, lists = "completion" if is_labelled else "completions", dict[str, pl.Expr]()
        for level, kl, number in levels:
            ids, roles, scores, cut, logps = (
                pl.col(column).list.slice(num_own * level, num_own) for column in OF_COMPLETIONS
            )
            lists[f"{kl}completion_ids{number}"] = ids
            lists[f"{kl}{name}{number}_cut"] = cut
            if not level and is_labelled:
                lists["label"] = roles.list.eval(pl.element() == int(Role.DESIRABLE))
            elif not level:
                lists["scores"] = scores
            lists[f"ref_{kl}logps{number}"] = logps
        columns |= lists
        flat = shards.select(**columns)
        flat = flat.explode([*lists]) if is_labelled else flat
    if decode is None:
        return flat
    return flat.select(part for name in columns for part in _with_text(name, layout.kind, decode))


def _with_text(name: str, kind: StoredKind, decode: Decode) -> Iterator[pl.Expr]:
    """A column, preceded by its decoded text if it has token ids."""
    if "_ids" in name:
        is_group = kind == StoredKind.SCORED and name != "prompt_ids"
        text = name.replace("completion_ids", "completions") if is_group else name
        make = partial(_texts, decode=decode, continues=name != "prompt_ids", is_group=is_group)
        dtype = pl.List(pl.String) if is_group else pl.String()
        texts = pl.col(name).map_batches(make, return_dtype=dtype, is_elementwise=True)
        yield texts.alias(text.replace("_ids", ""))
    yield pl.col(name)


def _texts(ids: pl.Series, *, decode: Decode, continues: bool, is_group: bool) -> pl.Series:
    if not is_group:
        return pl.Series([decode(one, continues) for one in ids.to_list()], dtype=pl.String)
    groups = [[decode(one, continues) for one in group] for group in ids.to_list()]
    return pl.Series(groups, dtype=pl.List(pl.String))


def _ordinary(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_list(kind):
        return pa.list_(_ordinary(kind.value_type))
    return pa.string() if pa.types.is_large_string(kind) else kind
