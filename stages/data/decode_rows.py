"""Decodes the rows of a chunk into checked records; rows that cannot be used go to quarantine."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa

from ...schemas.rows import BadRow, Record, Rejected, Text
from .chat_wrap import Wrapping
from .data_schema import OPTIONAL
from .data_shape import Cells, Shape
from .file_formats import ArrowRows, CsvRows, Payload
from .free_text import Watch
from .input_files import Chunk, InputFile, iter_chunks
from .validate import (
    read_number,
    read_options,
    read_system,
    read_tools,
    require_characters,
    shown,
)

Source: TypeAlias = "Mapping[str, str]"  # our column: the user's column


def parse_chunk(
    chunk: Chunk, shape: Shape, watch: Watch | None = None
) -> tuple[list[Record], list[Rejected]]:
    """Returns every row of a chunk once, in order: as a record, or rejected with a reason.

    A watch is shown the cells of formats that are read whole.
    """
    look = watch.look if watch and not isinstance(chunk.payload, ArrowRows) else None
    records: list[Record] = []
    rejected: list[Rejected] = []
    for row, cells in enumerate(read_cells(chunk.payload, shape.columns), start=chunk.row):
        try:
            if isinstance(cells, BadRow):
                raise cells
            if look:
                look(cells)
            records.append(_record(cells, shape, chunk.file, row))
        except BadRow as bad:
            rejected.append(Rejected(chunk.file, row, bad.reason, bad.detail))
        except RecursionError:
            rejected.append(Rejected(chunk.file, row, "schema", TOO_DEEP))
    return records, rejected


def first_records(inputs: Sequence[InputFile], shape: Shape) -> Iterator[Record]:
    """The first records of each file that can be used, few of them."""
    for file in inputs:
        for chunk in iter_chunks([file], shape.columns, rows_per_chunk=16):
            if records := parse_chunk(chunk, shape)[0]:
                yield from records
                break


@dataclass(frozen=True)
class Template:
    """The prompt with its system message, and the other arguments of the chat template."""

    prompt: Text
    tools: tuple[Any, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _record(cells: Cells, shape: Shape, file: int, row: int) -> Record:
    found = shape.declared.read(cells, shape)
    cells = {**cells, **found.more} if found.more else cells
    template = read_template(cells, shape.source, found.prompt, shape.wrap)
    carried = {
        name: read_number(cells.get(shape.source[name]), shape.source[name])
        for name in shape.carried
    }
    return Record(
        file,
        row,
        template.prompt,
        found.completions,
        found.roles,
        found.scores,
        template.tools,
        template.options,
        carried,
    )


def read_template(cells: Cells, source: Source, given_prompt: Text, wrap: Wrapping) -> Template:
    """The prompt with its system message, and what else its row gives the template."""
    prompt = wrap.prompt(given_prompt, source.get("prompt", "prompt"))
    given = {
        name: value
        for name in OPTIONAL
        if (column := source.get(name)) and (value := cells.get(column))
    }
    if not given:
        return Template(prompt)
    if isinstance(prompt, str):
        columns = ", ".join(repr(source[name]) for name in given)
        flags = " ".join(f"--map {name}=" for name in given)
        raise BadRow(
            "schema",
            f"{columns} can only be used when the prompt is a conversation: data.wrap=chat makes "
            f"one of text, {flags} leaves it out",
        )
    system = read_system(given.get("system"), source.get("system", ""))
    if isinstance(given_prompt, str):
        wrap.require_unrendered(system, source.get("system", ""))
    if system and prompt[0]["role"] == "system":
        raise BadRow("schema", f"{source['system']!r} is given but the prompt has a system message")
    return Template(
        ({"role": "system", "content": system}, *prompt) if system else prompt,
        read_tools(given.get("tools"), source.get("tools", "")),
        read_options(given.get("chat_template_kwargs"), source.get("chat_template_kwargs", "")),
    )


TOO_DEEP = "a value is nested too deeply to be read"
MOST_BYTES = 16 << 20  # of a row: a tokenizer takes a hundred times as much memory as its text


def read_cells(payload: Payload, columns: Collection[str]) -> Iterator[Cells | BadRow]:
    """Yields the cells of each row, or the reason why it cannot be read."""
    if isinstance(payload, ArrowRows):
        if (size := payload.batch.nbytes) > MOST_BYTES:  # of one row, or it would have been halved
            return iter([_too_large(size)] * len(payload))
        return _arrow_cells(payload.batch)
    if isinstance(payload, CsvRows):
        return (_or_bad(_csv_row, row, payload.header, columns) for row in payload.rows)
    return (_or_bad(_json_object, text, columns) for text in payload.texts)


def _or_bad(read: Callable[..., Cells], *arguments: Any) -> Cells | BadRow:
    try:
        return read(*arguments)
    except BadRow as bad:
        return bad
    except RecursionError:
        return BadRow("schema", TOO_DEEP)


def _too_large(size: int) -> BadRow:
    return BadRow("too_large", f"the row holds {size:,} bytes, and {MOST_BYTES:,} are the most")


def _json_object(text: bytes, columns: Collection[str]) -> Cells:
    if len(text) > MOST_BYTES:
        raise _too_large(len(text))
    try:
        row = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise BadRow("bad_utf8", f"byte {error.start} of the row is not UTF-8") from None
    except ValueError as error:
        raise BadRow("schema", f"no valid JSON ({error}): {shown(text)}") from None
    if not isinstance(row, dict):
        raise BadRow("schema", f"no JSON object: {shown(row)}")
    if b"\\u" in text:
        for column in columns:
            require_characters(row.get(column), column)
    return row


def _csv_row(row: Sequence[str], header: Sequence[str], columns: Collection[str]) -> Cells:
    if (size := sum(map(len, row))) > MOST_BYTES:
        raise _too_large(size)
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
    except (ValueError, KeyError, ArithmeticError):
        return (_arrow_row(batch, row) for row in range(batch.num_rows))
    return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def _column(column: pa.Array) -> list[Any]:
    if not pa.types.is_nested(column.type):
        cells: list[Any] = column.to_pylist()
        return cells
    if _has_map(column.type):  # asking for it costs half as much again
        return list(map(_without_nulls, column.to_pylist(maps_as_pydicts="strict")))
    return list(map(_without_nulls, column.to_pylist()))


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    return any(_has_map(kind.field(index).type) for index in range(kind.num_fields))


def _arrow_row(batch: pa.RecordBatch, row: int) -> Cells | BadRow:
    cells: Cells = {}
    for name in batch.schema.names:
        try:
            cells[name] = _column(batch.column(name).slice(row, 1))[0]
        except UnicodeDecodeError as error:
            detail = f"byte {error.start} of {name!r} is not UTF-8: {shown(error.object)}"
            return BadRow("bad_utf8", detail)
        except (ValueError, KeyError, ArithmeticError) as error:
            is_twice = "duplicate" in str(error)  # else it is a time or a decimal that Python lacks
            what = "has an object with a key twice" if is_twice else "cannot be read"
            return BadRow("schema", f"{name!r} {what}: {error}")
    return cells


def _without_nulls(value: Any) -> Any:
    """A struct of a columnar file has the keys of all its rows; those this one lacks are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return list(map(_without_nulls, value))
    return value
