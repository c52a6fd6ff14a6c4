"""The rows of a payload as Python values, by the user's column names, before any meaning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from ...schemas.rows import BadRow
from .formats import ArrowRows, CsvRows, JsonRows
from .values import require_characters, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from .formats import Payload
    from .shapes import Shape

Cells: TypeAlias = dict[str, Any]
TOO_DEEP = "a value is nested too deeply to be read"


def read_cells(payload: Payload, shape: Shape) -> Iterator[Cells | BadRow]:
    """Yields the cells of each row, or why the row has none."""
    if isinstance(payload, ArrowRows):
        return _arrow_cells(payload.batch)
    if isinstance(payload, CsvRows):
        return _csv_cells(payload, shape)
    return _json_cells(payload, shape)


def _json_cells(payload: JsonRows, shape: Shape) -> Iterator[Cells | BadRow]:
    columns = shape.columns
    return (_or_bad(_json_object, text, columns) for text in payload.texts)


def _or_bad(read: Callable[..., Cells], *arguments: Any) -> Cells | BadRow:
    try:
        return read(*arguments)
    except BadRow as bad:
        return bad
    except RecursionError:
        return BadRow("schema", TOO_DEEP)


def _json_object(text: bytes, columns: Collection[str]) -> Cells:
    try:
        row = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise BadRow("bad_utf8", f"byte {error.start} of the row is no UTF-8") from None
    except ValueError as error:
        raise BadRow("schema", f"no valid JSON ({error}): {shown(text)}") from None
    if not isinstance(row, dict):
        raise BadRow("schema", f"no JSON object: {shown(row)}")
    if b"\\u" in text:
        for column in columns:
            require_characters(row.get(column), column)
    return row


def _csv_cells(payload: CsvRows, shape: Shape) -> Iterator[Cells | BadRow]:
    return (_or_bad(_csv_row, row, payload.header, shape.columns) for row in payload.rows)


def _csv_row(row: Sequence[str], header: Sequence[str], columns: Collection[str]) -> Cells:
    if len(row) != len(header):
        raise BadRow("schema", f"{len(row)} cells under a header of {len(header)}: {shown(row)}")
    cells: Cells = dict(zip(header, row, strict=True))
    for column in columns:
        cell = cells.get(column, "")
        if not cell.isascii():
            require_characters(cell, column)
    return cells


def _arrow_cells(batch: pa.RecordBatch) -> Iterator[Cells | BadRow]:
    names = batch.schema.names
    try:
        columns = [_column(column) for column in batch.columns]
    except UnicodeDecodeError:
        return (_arrow_row(batch, row) for row in range(batch.num_rows))
    return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def _column(column: pa.Array) -> list[Any]:
    cells: list[Any] = column.to_pylist()
    return list(map(_without_nulls, cells)) if pa.types.is_nested(column.type) else cells


def _arrow_row(batch: pa.RecordBatch, row: int) -> Cells | BadRow:
    cells: Cells = {}
    for name in batch.schema.names:
        try:
            cells[name] = _column(batch.column(name).slice(row, 1))[0]
        except UnicodeDecodeError as error:
            detail = f"byte {error.start} of {name!r} is no UTF-8: {shown(error.object)}"
            return BadRow("bad_utf8", detail)
    return cells


def _without_nulls(value: Any) -> Any:
    """A struct of a columnar file has the keys of all its rows; those this one lacks are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return list(map(_without_nulls, value))
    return value
