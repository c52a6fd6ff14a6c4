"""Reads and writes shards: Parquet files, the same bytes for the same block.

Blocks of rows (numpy) become columns (Arrow), and columns blocks, without copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ....schemas.arrow_columns import (
    arrow_column,
    arrow_of,
    flattened,
    lengths_of,
    lists_over,
    number_column,
    number_type,
    numpy_of,
    ragged_of,
)
from ....schemas.columns import Column, ColumnTable, offsets_of
from ....schemas.errors import damaged, storage_error
from ....schemas.rows import ID_DIGITS, PromptKeys, RowBlock, ScoredBlock, hex_texts
from ....schemas.turns import learned_counts
from ..disk import fs

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
    """Reads a whole shard."""
    with open_shard(path) as file:
        return read_block(file.read(use_threads=False))


def iter_row_groups(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yields one table per row group, page checksums verified."""
    with open_shard(path) as file:
        for index in range(file.num_row_groups):
            yield file.read_row_group(index, columns=columns, use_threads=False)


def read_columns(path: Path, columns: Sequence[str]) -> tuple[pa.Table, NDArray[np.int64]]:
    """Some columns of a whole shard, and how many rows each row group has.

    Optional ones that the shard does not have are left out.
    """
    with open_shard(path) as file:
        groups = range(file.num_row_groups)
        sizes = [file.metadata.row_group(group).num_rows for group in groups]
        return file.read(columns=list(columns), use_threads=False), np.array(sizes, np.int64)


def read_rows(path: Path, rows: NDArray[np.int64]) -> Iterator[ScoredBlock]:
    """Some rows of a shard, ascending, row group by row group; no other group is read."""
    with open_shard(path) as file:
        groups = range(file.num_row_groups)
        offsets = offsets_of(np.array([file.metadata.row_group(one).num_rows for one in groups]))
        group_of = np.searchsorted(offsets, rows, side="right") - 1
        for group in np.unique(group_of).tolist():
            block = read_block(file.read_row_group(group, use_threads=False))
            yield block.take(rows[group_of == group] - offsets[group])


@contextmanager
def open_shard(path: Path) -> Iterator[pq.ParquetFile]:
    """Opens a shard for reading; what cannot be decoded is a CorruptionError."""
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


def group_bounds(rows: RowBlock, tokens: int = TOKENS_PER_GROUP) -> list[tuple[int, int]]:
    """Row groups as (start, stop): ROWS_PER_GROUP rows or so many tokens at most."""
    ends = rows.prompts.offsets + rows.completions.offsets[rows.branch_offsets]
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
        # None on floats: NaN and -0.0 make their bounds mean nothing.
        "write_statistics": ["row_id", "source.file", "source.row", "prompt_cut"],
        "store_schema": True,
    }


# The format's order. What is declared and not named here follows, and then what the data carry.
_ORDER = (
    *("row_id", "source", "prompt_key", "split_key", "prompt_tokens"),
    *("prompt_ids", "prompt_cut", "completion_ids", "role", "score", "cut", "num_tokens"),
    *("ref_logp", "ref_token_logps"),
)
_SOURCE = pa.struct(
    [pa.field("file", pa.string(), nullable=False), pa.field("row", pa.int64(), nullable=False)]
)
_TABLES = (PromptKeys, RowBlock, ScoredBlock)
_STORED = {
    each.stored: each for table in _TABLES for each in table.columns().values() if each.stored
}
# Columns with the lengths of other columns' lists.
_COUNTS = {
    each.counted: Column(each.per, "i4", stored=each.stored)
    for each in _STORED.values()
    if each.counted
}
TURNS = RowBlock.columns()["turns"].stored  # of shards with completions of several messages
OPTIONAL = tuple(name for name, each in _STORED.items() if each.per == "token")


def _per_branch(item: pa.DataType, *, nullable: bool = False) -> pa.DataType:
    return pa.list_(pa.field("element", item, nullable=nullable))


def _type_of(each: Column) -> pa.DataType:
    number = number_type(each.kind)
    value = _per_branch(number) if each.is_list else number
    is_nullable = each.per == "branch" and each.missing is not None
    return value if each.per == "row" else _per_branch(value, nullable=is_nullable)


def shard_schema(optional: Collection[str] = (), carried: Sequence[str] = ()) -> pa.Schema:
    """Columns of a shard, the same in every shard of a cache."""
    columns = {name: _type_of(each) for name, each in (_STORED | _COUNTS).items()}
    columns |= {"row_id": pa.string(), "source": _SOURCE}
    names = [*_ORDER, *(name for name in columns if name not in _ORDER)]
    kept = [name for name in names if name in optional or name not in OPTIONAL]
    columns |= dict.fromkeys(carried, pa.float64())
    return pa.schema([pa.field(name, columns[name], nullable=False) for name in (*kept, *carried)])


RESERVED = frozenset(shard_schema(OPTIONAL).names)


def carried_names(schema: pa.Schema) -> list[str]:
    """The columns of a shard that its data brought along."""
    return [name for name in schema.names if name not in RESERVED]


def _values(block: ScoredBlock) -> dict[str, Any]:
    """The values of declared columns, by their names in a shard; None where one is not kept."""
    tables: tuple[ColumnTable, ...] = (block.rows.prompt_keys, block.rows, block)
    values = {
        each.stored: table.told(name)
        for table in tables
        for name, each in table.columns().items()
        if each.stored
    }
    return values | {name: values[each.stored].lengths for name, each in _COUNTS.items()}


def to_table(block: ScoredBlock) -> pa.Table:
    """The columns of a shard, built over the arrays of the block."""
    rows, values = block.rows, _values(block)
    filled = [name for name, found in values.items() if found is not None]
    schema = shard_schema(filled, list(rows.carried))
    values |= rows.carried
    sources = [
        _text(hex_texts(rows.file.astype(">u8"), _FILE_DIGITS)),
        arrow_of(rows.row, pa.int64()),
    ]
    columns = {
        "row_id": _text(rows.ids()),
        "source": pa.StructArray.from_arrays(sources, fields=list(_SOURCE)),
    }
    of_rows = {name for name, each in (_STORED | _COUNTS).items() if each.per == "row"}
    for name in [name for name in schema.names if name not in columns]:
        kind = schema.field(name).type
        if name in of_rows or name in rows.carried:
            columns[name] = arrow_of(values[name], kind)
        else:
            nullable = kind.value_field.nullable
            inner = arrow_of(values[name], kind.value_type, nan_is_null=nullable)
            columns[name] = lists_over(rows.branch_offsets, inner, kind)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def read_block(table: pa.Table) -> ScoredBlock:
    """The block behind a table of all shard columns; the table may be a slice of another."""
    found: dict[str, Any] = dict.fromkeys(OPTIONAL)
    for name, each in _STORED.items():
        if name in table.column_names:
            values = arrow_column(table, name)
            values = values if each.per == "row" else flattened(values)
            found[name] = ragged_of(values) if each.is_list else numpy_of(values)
    keys, of_rows, of_scores = (
        {name: found[each.stored] for name, each in one.columns().items() if each.stored}
        for one in _TABLES
    )
    ids, copies = _parse_row_ids(arrow_column(table, "row_id"))
    sources = arrow_column(table, "source")
    rows = RowBlock(
        row_id=ids,
        copy=copies,
        file=_files(sources.field("file")),
        row=numpy_of(sources.field("row")),
        prompt_keys=PromptKeys(**keys),
        branch_offsets=offsets_of(lengths_of(arrow_column(table, "completion_ids"))),
        carried={name: number_column(table, name) for name in carried_names(table.schema)},
        **of_rows,
    )
    return ScoredBlock(rows, **of_scores)


def learned_tokens(table: pa.Table) -> NDArray[np.int32]:
    """The number of learned tokens of each completion, from a shard's narrow columns."""
    tokens: NDArray[np.int32] = numpy_of(flattened(arrow_column(table, "num_tokens")))
    if TURNS not in table.column_names:
        return tokens
    turns = ragged_of(flattened(arrow_column(table, TURNS)))
    return learned_counts(turns).astype(np.int32)


_RESTORE = "Restore it from a copy, or make the cache again."
_FILE_DIGITS = 16  # hex digits of a data file's identity


def _parse_row_ids(ids: pa.Array) -> tuple[NDArray[np.bytes_], NDArray[np.int32]]:
    """The digest and the copy of each."""
    names = ids.to_pylist()
    digests = bytes.fromhex("".join(name[:ID_DIGITS] for name in names))
    copies = np.array([int(name[ID_DIGITS + 1 :] or 0) for name in names], dtype=np.int32)
    return np.frombuffer(digests, dtype="S16"), copies


def _files(names: pa.Array) -> NDArray[np.uint64]:
    """The identities of data files, of their hex."""
    digits = bytes.fromhex("".join(names.to_pylist()))
    return np.frombuffer(digits, dtype=">u8").astype(np.uint64)


def _text(lines: Sequence[str]) -> pa.Array:
    encoded = [line.encode() for line in lines]
    offsets = offsets_of(np.array([len(line) for line in encoded], int)).astype(np.int32)
    buffers = pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))
    return pa.StringArray.from_buffers(len(encoded), *buffers)
