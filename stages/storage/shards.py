"""Reads and writes shards: Parquet files, the same bytes for the same block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import CorruptionError, storage_error
from ...schemas.rows import RowBlock, ScoredBlock
from . import fs
from .shard_columns import read_block, to_table

ROWS_PER_GROUP = 512
TOKENS_PER_GROUP = 512 * 1024


def write_shard(path: Path, block: ScoredBlock) -> None:
    """Writes a new file; it is not durable until it is fsynced."""
    table = to_table(block)
    with (
        fs.create(path) as sink,
        pq.ParquetWriter(sink, table.schema, **_settings(table.schema)) as writer,
    ):
        for start, stop in group_bounds(block.rows):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)


def read_shard(path: Path) -> ScoredBlock:
    """A whole shard."""
    with open_shard(path) as file:
        table = file.read(use_threads=False)
    return read_block(table, source=str(path))


def iter_row_groups(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """One table per row group, page checksums verified."""
    wanted = None if columns is None else list(columns)
    with open_shard(path) as file:
        for index in range(file.num_row_groups):
            yield file.read_row_group(index, columns=wanted, use_threads=False)


@contextmanager
def open_shard(path: Path) -> Iterator[pq.ParquetFile]:
    """A shard open for reading; what cannot be decoded is a CorruptionError."""
    with fs.open_regular(path) as source:
        try:
            yield pq.ParquetFile(
                source, pre_buffer=False, memory_map=False, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise storage_error("read", path, error) from error
            said = str(error).partition("\n")[0]
            raise CorruptionError(
                f"{path} is damaged: {said}. Restore it from a copy, or make the cache again."
            ) from error


def group_bounds(rows: RowBlock) -> list[tuple[int, int]]:
    """Row groups as (start, stop): ROWS_PER_GROUP rows or TOKENS_PER_GROUP tokens at most."""
    ends = rows.prompts.offsets + rows.completions.offsets[rows.branch_offsets]
    bounds = []
    start = 0
    while start < len(rows):
        full = int(np.searchsorted(ends, ends[start] + TOKENS_PER_GROUP, side="right")) - 1
        stop = max(start + 1, min(start + ROWS_PER_GROUP, full))
        bounds.append((start, stop))
        start = stop
    return bounds


_SPLIT = (  # numbers whose high bytes repeat: zstd does better on them byte by byte
    "prompt_ids.list.element",
    "completion_ids.list.element.list.element",
    "ref_logp.list.element",
    "ref_token_logps.list.element.list.element",
)


def _settings(schema: pa.Schema) -> dict[str, Any]:
    split = [path for path in _SPLIT if path.partition(".")[0] in schema.names]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": False,
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "write_page_checksum": True,
        # None on floats: NaN and -0.0 make their bounds mean nothing.
        "write_statistics": ["row_id", "source.file", "source.row", "prompt_cut"],
        "store_schema": True,
    }
