"""Converts blocks of rows (numpy) to the columns of a shard (Arrow) and back, without copies.

Arrow's own conversions import pandas, where it is installed, and its functions come with eight
megabytes of wrappers: thirty megabytes for nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.errors import CorruptionError
from ...schemas.rows import PromptKeys, Ragged, RowBlock, ScoredBlock, offsets_of


def to_table(block: ScoredBlock) -> pa.Table:
    """The columns of a shard, built over the arrays of the block."""
    rows, kept, schema = block.rows, block.token_logps, schema_of(block)
    places = [_file_names(rows.file), arrow_of(rows.row, pa.int64())]
    columns = {
        "row_id": row_ids(rows),
        "source": pa.StructArray.from_arrays(places, fields=list(schema.field("source").type)),
        "prompt_key": bytes_of(rows.prompt_keys.prompt),
        "split_key": arrow_of(rows.prompt_keys.split, pa.uint64()),
        "prompt_sketch": arrow_of(rows.prompt_keys.sketch, pa.uint64()),
        "prompt_tokens": arrow_of(rows.prompts.lengths, pa.int32()),
        "prompt_ids": _list_array(rows.prompts, schema.field("prompt_ids").type),
        "prompt_cut": arrow_of(rows.prompt_cut, pa.int32()),
        **{name: arrow_of(values, pa.float64()) for name, values in rows.carried.items()},
    }
    for name, tokens in {"completion_ids": rows.completions, "ref_token_logps": kept}.items():
        if tokens is not None:
            kind = schema.field(name).type
            inner = _list_array(tokens, kind.value_type)
            columns[name] = _lists_of(rows.branch_offsets, inner, kind)
    for name, values in _branch_columns(block).items():
        kind = schema.field(name).type
        inner = arrow_of(values, kind.value_type, nan_is_null=name == "score")
        columns[name] = _lists_of(rows.branch_offsets, inner, kind)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def read_block(table: pa.Table, *, source: str = "a shard") -> ScoredBlock:
    """The block behind a table of all shard columns; the table may be a slice of another."""
    _require_columns(table.schema, source)
    nested = _column(table, "completion_ids")
    branch_offsets = offsets_of(_lengths(nested))
    completions = _ragged(flattened(nested))
    branches = {name: _column(table, name) for name in _BRANCH_COLUMNS}
    _require(
        all(np.array_equal(_lengths(column), _lengths(nested)) for column in branches.values()),
        source,
        "has lists over branches of different lengths",
    )
    flat = {name: numpy_of(flattened(column)) for name, column in branches.items()}
    _require(
        np.array_equal(flat["num_tokens"], completions.lengths), source, "counts tokens wrongly"
    )
    rows = _row_block(table, source, branch_offsets, completions, flat)
    return ScoredBlock(rows, flat["ref_logp"], _token_logps(table, source, completions))


def schema_of(block: ScoredBlock) -> pa.Schema:
    """The columns a block fills."""
    kept = block.token_logps is not None
    return shard_schema(token_logps=kept, carried=list(block.rows.carried))


def row_ids(rows: RowBlock) -> pa.Array:
    """Row ids as text: the hex of the digest, and `-<copy>` from the second copy on."""
    text = np.ascontiguousarray(rows.row_id).tobytes().hex()
    starts = range(0, len(text), _HEX)
    return text_of(
        [
            text[start : start + _HEX] + (f"-{copy}" if copy else "")
            for start, copy in zip(starts, rows.copy.tolist(), strict=True)
        ]
    )


def parse_row_ids(ids: pa.Array, source: str) -> tuple[NDArray[np.bytes_], NDArray[np.int32]]:
    """The digest and the copy of each."""
    names = ids.to_pylist()
    good = all(name is not None and _ROW_ID.fullmatch(name) for name in names)
    _require(good, source, "holds a malformed row id")
    digests = bytes.fromhex("".join(name[:_HEX] for name in names))
    copies = np.array([int(name[_HEX + 1 :] or 0) for name in names], dtype=np.int32)
    return np.frombuffer(digests, dtype="S16"), copies


def ids_digest(ids: pa.Array) -> str:
    """One sha256 over row ids in order, each on its own line."""
    return hashlib.sha256("".join(f"{name}\n" for name in ids.to_pylist()).encode()).hexdigest()


def list_column(table: pa.Table, name: str) -> Ragged:
    """The lists of one column; the table may be a slice of another."""
    return _ragged(_column(table, name))


def number_column(table: pa.Table, name: str) -> NDArray[Any]:
    """The numbers of one column; the table may be a slice of another."""
    return numpy_of(_column(table, name))


_HEX = 32  # hex digits of a row's digest
_ROW_ID = re.compile(rf"[0-9a-f]{{{_HEX}}}(-[1-9][0-9]{{0,8}})?", re.ASCII)
_FILE = re.compile(r"[0-9a-f]{16}", re.ASCII)
_BRANCH_COLUMNS = ("role", "score", "cut", "num_tokens", "ref_logp")


def _branch_columns(block: ScoredBlock) -> dict[str, NDArray[Any]]:
    rows = block.rows
    values = (rows.roles, rows.scores, rows.cut, rows.completions.lengths, block.logps)
    return dict(zip(_BRANCH_COLUMNS, values, strict=True))


def _list_array(lists: Ragged, kind: pa.DataType) -> pa.Array:
    return _lists_of(lists.offsets, arrow_of(lists.values, kind.value_type), kind)


def _lists_of(offsets: NDArray[np.int64], inner: pa.Array, kind: pa.DataType) -> pa.Array:
    assert offsets[-1] == len(inner) < 2**31, (offsets[-1], len(inner))
    return pa.ListArray.from_arrays(arrow_of(offsets, pa.int32()), inner, type=kind)


def _row_block(
    table: pa.Table,
    source: str,
    branch_offsets: NDArray[np.int64],
    completions: Ragged,
    flat: dict[str, NDArray[Any]],
) -> RowBlock:
    ids, copies = parse_row_ids(_column(table, "row_id"), source)
    places = _column(table, "source")
    prompts = _ragged(_column(table, "prompt_ids"))
    counted = numpy_of(_column(table, "prompt_tokens"))
    _require(np.array_equal(counted, prompts.lengths), source, "counts prompt tokens wrongly")
    return RowBlock(
        row_id=ids,
        copy=copies,
        file=_files(places.field("file"), source),
        row=numpy_of(places.field("row")),
        prompt_keys=PromptKeys(
            digests_of(_column(table, "prompt_key")),
            *(numpy_of(_column(table, name)) for name in ("split_key", "prompt_sketch")),
        ),
        prompts=prompts,
        prompt_cut=numpy_of(_column(table, "prompt_cut")),
        branch_offsets=branch_offsets,
        completions=completions,
        roles=flat["role"],
        scores=flat["score"],
        cut=flat["cut"],
        carried={name: numpy_of(_column(table, name)) for name in carried_names(table.schema)},
    )


def _file_names(files: NDArray[np.uint64]) -> pa.Array:
    """The identities of data files in hex."""
    text = files.astype(">u8").tobytes().hex()
    return text_of([text[start : start + 16] for start in range(0, len(text), 16)])


def _files(names: pa.Array, source: str) -> NDArray[np.uint64]:
    text = names.to_pylist()
    _require(all(map(_FILE.fullmatch, text)), source, "holds a malformed name of a data file")
    return np.frombuffer(bytes.fromhex("".join(text)), dtype=">u8").astype(np.uint64)


def _token_logps(table: pa.Table, source: str, completions: Ragged) -> Ragged | None:
    if "ref_token_logps" not in table.column_names:
        return None
    logps = _ragged(flattened(_column(table, "ref_token_logps")))
    same = np.array_equal(logps.offsets, completions.offsets)
    _require(same, source, "holds other token log-probs than tokens")
    return logps


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def _ragged(lists: pa.Array) -> Ragged:
    return Ragged(numpy_of(flattened(lists)), offsets_of(_lengths(lists)))


def _lengths(lists: pa.Array) -> NDArray[Any]:
    return np.diff(numpy_of(lists.offsets))


def carried_names(schema: pa.Schema) -> list[str]:
    """The columns of a shard that its data brought along."""
    known = shard_schema(token_logps=True, carried=()).names
    return [name for name in schema.names if name not in known]


def _require_columns(schema: pa.Schema, source: str) -> None:
    kept = "ref_token_logps" in schema.names
    expected = shard_schema(token_logps=kept, carried=carried_names(schema))
    _require(schema.equals(expected), source, "has other columns than a shard")


def _require(good: bool, source: str, what: str) -> None:
    if not good:
        raise CorruptionError(f"{source} {what}. Restore it from a copy, or make the cache again.")


def shard_schema(*, token_logps: bool, carried: Sequence[str]) -> pa.Schema:
    """Columns of a shard, the same in every shard of a cache."""

    def column(name: str, kind: pa.DataType) -> pa.Field:
        return pa.field(name, kind, nullable=False)

    def per_branch(item: pa.DataType, *, nullable: bool = False) -> pa.DataType:
        return pa.list_(pa.field("element", item, nullable=nullable))

    source = pa.struct([column("file", pa.string()), column("row", pa.int64())])
    columns = [
        column("row_id", pa.string()),
        column("source", source),
        column("prompt_key", pa.binary(16)),
        column("split_key", pa.uint64()),
        column("prompt_sketch", pa.uint64()),
        column("prompt_tokens", pa.int32()),
        column("prompt_ids", per_branch(pa.int32())),
        column("prompt_cut", pa.int32()),
        column("completion_ids", per_branch(per_branch(pa.int32()))),
        column("role", per_branch(pa.int8())),
        column("score", per_branch(pa.float64(), nullable=True)),
        column("cut", per_branch(pa.int32())),
        column("num_tokens", per_branch(pa.int32())),
        column("ref_logp", per_branch(pa.float64())),
    ]
    if token_logps:
        columns.append(column("ref_token_logps", per_branch(per_branch(pa.float32()))))
    columns += [column(name, pa.float64()) for name in carried]
    return pa.schema(columns)


DTYPES: dict[pa.DataType, np.dtype[Any]] = {
    pa.int8(): np.dtype(np.int8),
    pa.int32(): np.dtype(np.int32),
    pa.int64(): np.dtype(np.int64),
    pa.uint64(): np.dtype(np.uint64),
    pa.float32(): np.dtype(np.float32),
    pa.float64(): np.dtype(np.float64),
}


def arrow_of(values: NDArray[Any], kind: pa.DataType, *, nan_is_null: bool = False) -> pa.Array:
    """An array of numbers over the same memory where type and layout allow it."""
    plain = np.ascontiguousarray(values, dtype=DTYPES[kind])
    validity = None
    if nan_is_null and (missing := np.isnan(plain)).any():
        validity = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(kind, len(plain), [validity, pa.py_buffer(plain)])


def text_of(lines: Sequence[str]) -> pa.Array:
    """An array of strings."""
    encoded = [line.encode() for line in lines]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(line) for line in encoded], out=offsets[1:])
    buffers = pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))
    return pa.StringArray.from_buffers(len(encoded), *buffers)


def bytes_of(digests: NDArray[np.bytes_]) -> pa.Array:
    """An array of byte strings of one length over the same memory."""
    plain = np.ascontiguousarray(digests)
    kind = pa.binary(plain.itemsize)
    return pa.Array.from_buffers(kind, len(plain), [None, pa.py_buffer(plain.view(np.uint8))])


def digests_of(values: pa.Array) -> NDArray[np.bytes_]:
    """Byte strings of one length over their memory; none is null."""
    width = values.type.byte_width
    _, content = values.buffers()
    if content is None:
        return np.empty(0, dtype=f"S{width}")
    return np.frombuffer(content, f"S{width}")[values.offset :][: len(values)]


def flattened(lists: pa.Array) -> pa.Array:
    """What the lists hold, end to end; of a slice its own part only."""
    if not len(lists):
        return lists.values.slice(0, 0)
    offsets = numpy_of(lists.offsets)
    return lists.values.slice(offsets[0], offsets[-1] - offsets[0])


def numpy_of(values: pa.Array) -> NDArray[Any]:
    """The numbers of an array over its memory; NaN, in memory of its own, where one is null."""
    validity, numbers = values.buffers()
    dtype = DTYPES[values.type]
    if numbers is None:
        return np.empty(0, dtype)
    array: NDArray[Any] = np.frombuffer(numbers, dtype)[values.offset :][: len(values)]
    if not values.null_count:
        return array
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    filled = array.copy()
    filled[bits[values.offset :][: len(values)] == 0] = np.nan
    return filled
