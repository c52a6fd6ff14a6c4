"""Reads and writes shards: Parquet files, the same bytes for the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...schemas.columns import (
    Ragged,
    arrow_column,
    arrow_of,
    flattened,
    list_offsets,
    lists_over,
    numpy_of,
    offsets_of,
    packed,
    ragged_of,
)
from ...schemas.errors import damaged, storage_error
from ...schemas.row_table import (
    CARRIED,
    COMPLETION,
    COUNTS,
    LEARNED,
    RESERVED,
    ROW,
    Rows,
    learned_counts,
    list_of,
)
from .disk import fs

ROWS_PER_GROUP = 512
TOKENS_PER_GROUP = 512 * 1024


def write_shard(path: Path, rows: Rows) -> None:
    """Writes a new shard; the caller makes it durable."""
    table = to_table(rows)
    with (
        fs.create(path) as sink,
        pq.ParquetWriter(sink, table.schema, **_settings(table.schema)) as writer,
    ):
        for start, stop in group_bounds(rows):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)


def read_shard(path: Path) -> Rows:
    """Reads a whole shard."""
    with open_shard(path) as file:
        return read_block(file.read(use_threads=False))


def iter_row_groups(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yields one table per row group, page checksums verified."""
    with open_shard(path) as file:
        for index in range(file.num_row_groups):
            yield file.read_row_group(index, columns=columns, use_threads=False)


def read_columns(path: Path, columns: Sequence[str]) -> tuple[pa.Table, NDArray[np.int64]]:
    """Some columns of a whole shard, and the number of rows of each row group.

    Optional columns that the shard does not have are left out.
    """
    with open_shard(path) as file:
        groups = range(file.num_row_groups)
        sizes = [file.metadata.row_group(group).num_rows for group in groups]
        return file.read(columns=list(columns), use_threads=False), np.array(sizes, np.int64)


def read_rows(path: Path, rows: NDArray[np.int64]) -> Iterator[Rows]:
    """Some rows of a shard, ascending, row group by row group; other groups are not read."""
    with open_shard(path) as file:
        groups = range(file.num_row_groups)
        offsets = offsets_of(np.array([file.metadata.row_group(one).num_rows for one in groups]))
        group_of = np.searchsorted(offsets, rows, side="right") - 1
        for group in np.unique(group_of).tolist():
            block = read_block(file.read_row_group(group, use_threads=False))
            yield block.take(rows[group_of == group] - offsets[group])


@contextmanager
def open_shard(path: Path) -> Iterator[pq.ParquetFile]:
    """Opens a shard for reading; CorruptionError if it cannot be decoded."""
    with fs.open_file(path) as source:
        try:
            yield pq.ParquetFile(
                source, pre_buffer=False, memory_map=False, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise storage_error("read", path, error) from error
            said = str(error).partition("\n")[0]
            raise damaged(path, said, _RESTORE) from error


def group_bounds(rows: Rows, tokens: int = TOKENS_PER_GROUP) -> list[tuple[int, int]]:
    """Row groups as (start, stop), with at most ROWS_PER_GROUP rows and so many tokens."""
    ends = rows.prompts.offsets + rows.completions.offsets[rows.completion_offsets]
    bounds = []
    start = 0
    while start < len(rows):
        full = int(np.searchsorted(ends, ends[start] + tokens, side="right")) - 1
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
        # None for floats: NaN and -0.0 make their bounds meaningless.
        "write_statistics": ["row_id", "source.file", "source.row", "prompt_cut"],
        "store_schema": True,
    }


TURNS = "completion_turns"  # only in shards with completions of several messages


def to_table(rows: Rows) -> pa.Table:
    """The columns of a shard, over the same memory; all shards of a cache have the same ones."""
    found: dict[str, Any] = dict(zip(rows.of_rows.schema.names, rows.of_rows.columns, strict=True))
    completions = rows.of_completions
    found |= zip(completions.schema.names, completions.columns, strict=True)
    found |= {"prompt_ids": rows.prompts, "completion_ids": rows.completions}
    found |= {name: found[of].lengths for name, of in COUNTS.items()}
    is_told = rows.learned is not None and (rows.learned.values != LEARNED).any()
    found |= {TURNS: rows.learned if is_told else None, "ref_token_logps": rows.token_logps}
    fields, columns = [], []
    for name in [*ROW, *COMPLETION, *rows.carried]:
        kind = (ROW | COMPLETION).get(name, CARRIED)
        if found[name] is None:  # all tokens are learned, or the cache has no token log-probs
            continue
        column = _nested(found[name], kind)
        if name in COMPLETION:
            kind = list_of(kind, nullable=name == "score" or column.null_count > 0)
            column = lists_over(rows.completion_offsets, column, kind)
        columns.append(column)
        fields.append(pa.field(name, kind, nullable=False))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _nested(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, Ragged):
        return lists_over(values.offsets, arrow_of(values.values, kind.value_type), kind)
    return arrow_of(values, kind)


def read_block(table: pa.Table) -> Rows:
    """The rows of a table with all, or with the needed, columns of a shard."""
    own: dict[str, Any] = {}
    completions: dict[str, Any] = {}
    offsets = np.zeros(1, np.int64)
    for name in table.column_names:
        column = arrow_column(table, name)
        if name in COMPLETION:
            offsets = list_offsets(column)
            column = flattened(column)
        if name not in COUNTS:
            found = packed(ragged_of(column)) if pa.types.is_list(column.type) else column
            (completions if name in COMPLETION else own)[name] = found
    if TURNS not in completions:
        completions[TURNS] = pa.nulls(int(offsets[-1]), pa.large_binary())
    return Rows.of(own, completions, offsets)


def carried_names(schema: pa.Schema) -> list[str]:
    """The extra columns of a shard, which come from the data."""
    return [name for name in schema.names if name not in RESERVED]


def learned_tokens(table: pa.Table) -> NDArray[np.int32]:
    """The number of learned tokens of each completion, from a shard's narrow columns."""
    tokens: NDArray[np.int32] = numpy_of(flattened(arrow_column(table, "num_tokens")))
    if TURNS not in table.column_names:
        return tokens
    turns = ragged_of(flattened(arrow_column(table, TURNS)))
    return learned_counts(turns).astype(np.int32)


_RESTORE = "Restore it from a copy, or make the cache again."
