"""Reads and writes shards: Parquet files, the same bytes for the same block.

Blocks of rows (numpy) become columns (Arrow), and columns blocks, without copies. Arrow's own
conversions import pandas, where it is installed, and its functions come with eight megabytes of
wrappers: thirty megabytes for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ....schemas.columns import Ragged, offsets_of
from ....schemas.errors import CorruptionError, storage_error
from ....schemas.rows import PromptKeys, RowBlock, ScoredBlock
from ..bucket.objects import Location
from ..disk import fs
from ..store import store_of

Values: TypeAlias = "NDArray[Any] | Ragged"

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


def read_shard(path: Location) -> ScoredBlock:
    """Reads a whole shard."""
    with open_shard(path) as file:
        table = file.read(use_threads=False)
    return read_block(table, source=str(path))


def iter_row_groups(path: Location, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yields one table per row group, page checksums verified."""
    with open_shard(path) as file:
        for index in range(file.num_row_groups):
            yield file.read_row_group(index, columns=columns, use_threads=False)


def read_columns(path: Location, columns: Sequence[str]) -> tuple[pa.Table, NDArray[np.int64]]:
    """Some columns of a whole shard, and how many rows each row group has."""
    with open_shard(path) as file:
        groups = range(file.num_row_groups)
        sizes = [file.metadata.row_group(group).num_rows for group in groups]
        # The names and types of columns have no checksum.
        _require_schema(file.schema_arrow, str(path), with_columns=columns)
        return file.read(columns=list(columns), use_threads=False), np.array(sizes, np.int64)


def read_rows(path: Location, rows: NDArray[np.int64]) -> Iterator[ScoredBlock]:
    """Some rows of a shard, ascending, row group by row group; no other group is read."""
    with open_shard(path) as file:
        groups = range(file.num_row_groups)
        offsets = offsets_of(np.array([file.metadata.row_group(one).num_rows for one in groups]))
        group_of = np.searchsorted(offsets, rows, side="right") - 1
        for group in np.unique(group_of).tolist():
            table = file.read_row_group(group, use_threads=False)
            block = read_block(table, source=str(path))
            yield block.take(rows[group_of == group] - offsets[group])


@contextmanager
def open_shard(path: Location) -> Iterator[pq.ParquetFile]:
    """Opens a shard for reading; what cannot be decoded is a CorruptionError."""
    with store_of(path).open(path) as source:
        try:
            yield pq.ParquetFile(
                source, pre_buffer=False, memory_map=False, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise storage_error("read", Path(str(path)), error) from error
            said = str(error).partition("\n")[0]
            raise CorruptionError(f"{path} is damaged: {said}. {_RESTORE}") from error


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


def shard_schema(*, token_logps: bool, carried: Sequence[str]) -> pa.Schema:
    """Columns of a shard, the same in every shard of a cache."""

    def per_branch(item: pa.DataType, *, nullable: bool = False) -> pa.DataType:
        return pa.list_(pa.field("element", item, nullable=nullable))

    file = pa.field("file", pa.string(), nullable=False)
    row = pa.field("row", pa.int64(), nullable=False)
    kinds = {
        "row_id": pa.string(),
        "source": pa.struct([file, row]),
        "prompt_key": pa.binary(16),
        "split_key": pa.uint64(),
        "prompt_sketch": pa.uint64(),
        "prompt_tokens": pa.int32(),
        "prompt_ids": per_branch(pa.int32()),
        "prompt_cut": pa.int32(),
        "completion_ids": per_branch(per_branch(pa.int32())),
        "role": per_branch(pa.int8()),
        "score": per_branch(pa.float64(), nullable=True),
        "cut": per_branch(pa.int32()),
        "num_tokens": per_branch(pa.int32()),
        "ref_logp": per_branch(pa.float64()),
    }
    if token_logps:
        kinds["ref_token_logps"] = per_branch(per_branch(pa.float32()))
    kinds |= dict.fromkeys(carried, pa.float64())
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def schema_of(block: ScoredBlock) -> pa.Schema:
    """The columns a block fills."""
    kept = block.token_logps is not None
    return shard_schema(token_logps=kept, carried=list(block.rows.carried))


def carried_names(schema: pa.Schema) -> list[str]:
    """The columns of a shard that its data brought along."""
    known = shard_schema(token_logps=True, carried=()).names
    return [name for name in schema.names if name not in known]


def to_table(block: ScoredBlock) -> pa.Table:
    """The columns of a shard, built over the arrays of the block."""
    rows, schema = block.rows, schema_of(block)
    sources = [_text(_hex(rows.file.astype(">u8"), _FILE_DIGITS)), arrow_of(rows.row, pa.int64())]
    columns = {
        "row_id": _text(row_ids(rows)),
        "source": pa.StructArray.from_arrays(sources, fields=list(schema.field("source").type)),
    }
    of_rows: dict[str, Values] = {
        "prompt_key": rows.prompt_keys.prompt,
        "split_key": rows.prompt_keys.split,
        "prompt_sketch": rows.prompt_keys.sketch,
        "prompt_tokens": rows.prompts.lengths,
        "prompt_ids": rows.prompts,
        "prompt_cut": rows.prompt_cut,
        **rows.carried,
    }
    for name, values in of_rows.items():
        columns[name] = arrow_of(values, schema.field(name).type)
    for name, values in _branch_columns(block).items():
        kind = schema.field(name).type
        inner = arrow_of(values, kind.value_type, nan_is_null=kind.value_field.nullable)
        columns[name] = lists_over(rows.branch_offsets, inner, kind)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _branch_columns(block: ScoredBlock) -> dict[str, Values]:
    rows, logps = block.rows, block.token_logps
    return {
        "completion_ids": rows.completions,
        "role": rows.roles,
        "score": rows.scores,
        "cut": rows.cut,
        "num_tokens": rows.completions.lengths,
        "ref_logp": block.logps,
        **({} if logps is None else {"ref_token_logps": logps}),
    }


def read_block(table: pa.Table, *, source: str = "a shard") -> ScoredBlock:
    """The block behind a table of all shard columns; the table may be a slice of another."""
    _require_schema(table.schema, source)
    kept = "ref_token_logps" in table.column_names
    nested = _column(table, "completion_ids")
    branch_offsets, completions = offsets_of(_lengths(nested)), ragged_of(_flattened(nested))
    names = ("role", "score", "cut", "num_tokens", "ref_logp")
    lists = {name: list_column(table, name) for name in names}
    same = all(np.array_equal(column.offsets, branch_offsets) for column in lists.values())
    _require(same, source, "has lists over branches of different lengths")
    flat = {name: column.values for name, column in lists.items()}
    counted = np.array_equal(flat["num_tokens"], completions.lengths)
    _require(counted, source, "counts tokens wrongly")
    token_logps = ragged_of(_flattened(_column(table, "ref_token_logps"))) if kept else None
    same = token_logps is None or np.array_equal(token_logps.offsets, completions.offsets)
    _require(same, source, "holds other token log-probs than tokens")
    rows = _row_block(table, source, branch_offsets, completions, flat)
    return ScoredBlock(rows, flat["ref_logp"], token_logps)


def _require_schema(schema: pa.Schema, source: str, with_columns: Sequence[str] = ()) -> None:
    kept, carried = "ref_token_logps" in schema.names, carried_names(schema)
    expected = shard_schema(token_logps=kept, carried=carried)
    is_as_made = schema.equals(expected) and {*with_columns} <= {*schema.names}
    _require(is_as_made, source, "has other columns than a shard")


def _row_block(
    table: pa.Table,
    source: str,
    branch_offsets: NDArray[np.int64],
    completions: Ragged,
    flat: dict[str, NDArray[Any]],
) -> RowBlock:
    ids, copies = parse_row_ids(_column(table, "row_id"), source)
    sources, prompts = _column(table, "source"), list_column(table, "prompt_ids")
    counted = np.array_equal(number_column(table, "prompt_tokens"), prompts.lengths)
    _require(counted, source, "counts prompt tokens wrongly")
    return RowBlock(
        row_id=ids,
        copy=copies,
        file=_files(sources.field("file"), source),
        row=numpy_of(sources.field("row")),
        prompt_keys=PromptKeys(*(number_column(table, name) for name in _PROMPT_KEYS)),
        prompts=prompts,
        prompt_cut=number_column(table, "prompt_cut"),
        branch_offsets=branch_offsets,
        completions=completions,
        roles=flat["role"],
        scores=flat["score"],
        cut=flat["cut"],
        carried={name: number_column(table, name) for name in carried_names(table.schema)},
    )


def _require(good: bool, source: str, what: str) -> None:
    if not good:
        raise CorruptionError(f"{source} {what}. {_RESTORE}")


_RESTORE = "Restore it from a copy, or make the cache again."
_PROMPT_KEYS = ("prompt_key", "split_key", "prompt_sketch")
_ID_DIGITS, _FILE_DIGITS = 32, 16  # hex digits of a row's digest and of a data file's
_ROW_ID = re.compile(rf"[0-9a-f]{{{_ID_DIGITS}}}(-[1-9][0-9]{{0,8}})?", re.ASCII)
_FILE = re.compile(rf"[0-9a-f]{{{_FILE_DIGITS}}}", re.ASCII)


def row_ids(rows: RowBlock) -> list[str]:
    """Row ids as text: the hex of the digest, and `-<copy>` from the second copy on."""
    digests = _hex(rows.row_id, _ID_DIGITS)
    copies = (f"-{copy}" if copy else "" for copy in rows.copy.tolist())
    return [digest + copy for digest, copy in zip(digests, copies, strict=True)]


def parse_row_ids(ids: pa.Array, source: str) -> tuple[NDArray[np.bytes_], NDArray[np.int32]]:
    """The digest and the copy of each."""
    names = ids.to_pylist()
    good = all(name is not None and _ROW_ID.fullmatch(name) for name in names)
    _require(good, source, "holds a malformed row id")
    digests = bytes.fromhex("".join(name[:_ID_DIGITS] for name in names))
    copies = np.array([int(name[_ID_DIGITS + 1 :] or 0) for name in names], dtype=np.int32)
    return np.frombuffer(digests, dtype="S16"), copies


def _files(names: pa.Array, source: str) -> NDArray[np.uint64]:
    """The identities of data files, of their hex."""
    text = names.to_pylist()
    _require(all(map(_FILE.fullmatch, text)), source, "holds a malformed name of a data file")
    return np.frombuffer(bytes.fromhex("".join(text)), dtype=">u8").astype(np.uint64)


def _hex(values: NDArray[Any], digits: int) -> list[str]:
    text = np.ascontiguousarray(values).tobytes().hex()
    return [text[start : start + digits] for start in range(0, len(text), digits)]


def list_column(table: pa.Table, name: str) -> Ragged:
    """The lists of one column; the table may be a slice of another."""
    return ragged_of(_column(table, name))


def number_column(table: pa.Table, name: str) -> NDArray[Any]:
    """The values of one column; the table may be a slice of another."""
    return numpy_of(_column(table, name))


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def ragged_of(lists: pa.Array) -> Ragged:
    """Lists of numbers; of a slice its own part only."""
    return Ragged(numpy_of(_flattened(lists)), offsets_of(_lengths(lists)))


def _lengths(lists: pa.Array) -> NDArray[Any]:
    return np.diff(numpy_of(lists.offsets))


def _flattened(lists: pa.Array) -> pa.Array:
    """The values of lists, end to end; of a slice its own part only."""
    if not len(lists):
        return lists.values.slice(0, 0)
    offsets = numpy_of(lists.offsets)
    return lists.values.slice(offsets[0], offsets[-1] - offsets[0])


_NUMBERS = ("int8", "int32", "int64", "uint64", "float32", "float64")
_DTYPES = {pa.from_numpy_dtype(name): np.dtype(name) for name in _NUMBERS}
_DTYPES[pa.binary(16)] = np.dtype("S16")


def numpy_of(values: pa.Array) -> NDArray[Any]:
    """The values of an array over its memory; NaN, in memory of its own, where one is null."""
    validity, content = values.buffers()
    dtype = _DTYPES[values.type]
    if content is None:
        return np.empty(0, dtype)
    array: NDArray[Any] = np.frombuffer(content, dtype)[values.offset :][: len(values)]
    if not values.null_count:
        return array
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    filled = array.copy()
    filled[bits[values.offset :][: len(values)] == 0] = np.nan
    return filled


def arrow_of(values: Values, kind: pa.DataType, *, nan_is_null: bool = False) -> pa.Array:
    """Values, or lists of them, over the same memory where type and layout allow it."""
    if isinstance(values, Ragged):
        return lists_over(values.offsets, arrow_of(values.values, kind.value_type), kind)
    plain = np.ascontiguousarray(values, dtype=_DTYPES[kind])
    validity = None
    if nan_is_null and (missing := np.isnan(plain)).any():
        validity = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(kind, len(plain), [validity, pa.py_buffer(plain)])


def lists_over(offsets: NDArray[np.int64], inner: pa.Array, kind: pa.DataType) -> pa.Array:
    """Lists over what they hold, end to end."""
    assert offsets[-1] == len(inner) < 2**31, (offsets[-1], len(inner))
    return pa.ListArray.from_arrays(arrow_of(offsets, pa.int32()), inner, type=kind)


def _text(lines: Sequence[str]) -> pa.Array:
    encoded = [line.encode() for line in lines]
    offsets = offsets_of(np.array([len(line) for line in encoded], int)).astype(np.int32)
    buffers = pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))
    return pa.StringArray.from_buffers(len(encoded), *buffers)
