"""A cache as one flat Parquet file, its columns named as TRL's trainers name them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import CorruptionError, UsageError
from ..storage import fs
from ..storage.manifest_file import load_manifest
from ..storage.shard_columns import read_block
from ..storage.shards import iter_row_groups
from .flat import Decode, flat_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..storage.cache_folder import CacheFolder


def export_trl(
    folder: CacheFolder, target: Path, *, decode: Decode, overwrite: bool = False
) -> int:
    """Writes `target` in one step and returns how many rows it holds."""
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


def _flat_tables(folder: CacheFolder, decode: Decode) -> Iterator[pa.Table]:
    manifest = load_manifest(folder)
    if not manifest.rows:
        raise UsageError(f"{folder.root} holds no rows, so there is nothing to export.")
    for shard in manifest.shards:
        path = folder.data / shard.file
        for group in iter_row_groups(path):
            yield flat_table(read_block(group, source=str(path)), decode, source=str(path))


def _write(sink: BinaryIO, tables: Iterator[pa.Table]) -> int:
    num_rows = 0
    with ExitStack() as stack:
        writer = None
        for table in tables:
            if writer is None:
                opened = pq.ParquetWriter(sink, table.schema, compression="zstd")
                writer = stack.enter_context(opened)
            if not table.schema.equals(writer.schema):
                raise CorruptionError(
                    "The shards of this cache hold different kinds of rows. Make the cache anew."
                )
            writer.write_table(table)
            num_rows += len(table)
    return num_rows
