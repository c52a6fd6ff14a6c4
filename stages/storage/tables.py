"""Between blocks of rows (numpy) and the columns of a shard (Arrow), without Python lists."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...schemas.errors import CorruptionError
from ...schemas.ragged import Ragged, offsets_of
from ...schemas.rows import RowBlock
from ...schemas.shards import ScoredBlock, shard_schema
from .arrow import arrow_of, numpy_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


def to_table(block: ScoredBlock) -> pa.Table:
    """The columns of a shard, built over the arrays of the block."""
    rows, kept, schema = block.rows, block.token_logps, schema_of(block)
    places = [arrow_of(rows.file, pa.int32()), arrow_of(rows.row, pa.int64())]
    columns = {
        "row_id": row_ids(rows),
        "source": pa.StructArray.from_arrays(places, fields=list(schema.field("source").type)),
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
    completions = _ragged(nested.flatten())
    branches = {name: _column(table, name) for name in _BRANCH_COLUMNS}
    _require(
        all(np.array_equal(_lengths(column), _lengths(nested)) for column in branches.values()),
        source,
        "has lists over branches of different lengths",
    )
    flat = {name: numpy_of(column.flatten()) for name, column in branches.items()}
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
    text = np.ascontiguousarray(rows.row_id).tobytes().hex().encode()
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * _HEX
    plain = pa.StringArray.from_buffers(len(rows), pa.py_buffer(offsets), pa.py_buffer(text))
    if not rows.copy.any():
        return plain
    copies = arrow_of(rows.copy, pa.int32())
    named = pc.binary_join_element_wise(plain, pc.cast(copies, pa.string()), "-")
    return pc.if_else(pc.greater(copies, 0), named, plain)


def ids_digest(ids: pa.Array) -> str:
    """One sha256 over row ids in order, each on its own line."""
    return hashlib.sha256("".join(f"{name}\n" for name in ids.to_pylist()).encode()).hexdigest()


def list_column(table: pa.Table, name: str) -> Ragged:
    """The lists of one column; the table may be a slice of another."""
    return _ragged(_column(table, name))


_HEX = 32  # hex digits of a row's digest
_ROW_ID = rf"^[0-9a-f]{{{_HEX}}}(-[1-9][0-9]{{0,8}})?$"
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
    ids, copies = _parse_row_ids(_column(table, "row_id"), source)
    places = _column(table, "source")
    return RowBlock(
        row_id=ids,
        copy=copies,
        file=numpy_of(pc.struct_field(places, "file")),
        row=numpy_of(pc.struct_field(places, "row")),
        prompts=_ragged(_column(table, "prompt_ids")),
        prompt_cut=numpy_of(_column(table, "prompt_cut")),
        branch_offsets=branch_offsets,
        completions=completions,
        roles=flat["role"],
        scores=flat["score"],
        cut=flat["cut"],
        carried={name: numpy_of(_column(table, name)) for name in _carried(table.schema)},
    )


def _token_logps(table: pa.Table, source: str, completions: Ragged) -> Ragged | None:
    if "ref_token_logps" not in table.column_names:
        return None
    logps = _ragged(_column(table, "ref_token_logps").flatten())
    same = np.array_equal(logps.offsets, completions.offsets)
    _require(same, source, "holds other token log-probs than tokens")
    return logps


def _parse_row_ids(ids: pa.Array, source: str) -> tuple[NDArray[np.bytes_], NDArray[np.int32]]:
    good = pc.all(pc.match_substring_regex(ids, _ROW_ID)).as_py()
    _require(good is not False, source, "holds a malformed row id")
    digests = pc.utf8_slice_codeunits(ids, 0, _HEX)
    # From a Python list of offsets Arrow would import pandas.
    everything = arrow_of(np.array([0, len(ids)]), pa.int32())
    joined = pc.binary_join(pa.ListArray.from_arrays(everything, digests), "")
    raw = bytes.fromhex(joined[0].as_py())
    numbers = pc.utf8_slice_codeunits(ids, _HEX + 1)
    copies = pc.cast(pc.if_else(pc.equal(numbers, ""), "0", numbers), pa.int32())
    return np.frombuffer(raw, dtype="S16"), numpy_of(copies)


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def _ragged(lists: pa.Array) -> Ragged:
    # Never `.values`: of a sliced array it is the whole array.
    return Ragged(numpy_of(lists.flatten()), offsets_of(_lengths(lists)))


def _lengths(lists: pa.Array) -> NDArray[Any]:
    return numpy_of(pc.list_value_length(lists))


def _carried(schema: pa.Schema) -> list[str]:
    known = shard_schema(token_logps=True, carried=()).names
    return [name for name in schema.names if name not in known]


def _require_columns(schema: pa.Schema, source: str) -> None:
    kept = "ref_token_logps" in schema.names
    expected = shard_schema(token_logps=kept, carried=_carried(schema))
    _require(schema.equals(expected), source, "has other columns than a shard")


def _require(good: bool, source: str, what: str) -> None:
    if not good:
        raise CorruptionError(f"{source} {what}. Restore it from a copy, or make the cache anew.")
