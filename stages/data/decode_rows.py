"""Decodes the rows of a chunk into checked records; rows that cannot be used go to quarantine."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeAlias

import pyarrow as pa

from ...schemas.rows import BadRow, Record, Rejected, Role, Text
from .chat_wrap import Wrapping
from .data_schema import OPTIONAL, SCORES, Kind, Shape
from .file_formats import ArrowRows, CsvRows, JsonRows, Payload
from .free_text import Watch
from .input_files import Chunk, InputFile, iter_chunks
from .validate import (
    ASSISTANT,
    is_blank,
    read_label,
    read_list,
    read_number,
    read_options,
    read_prompt,
    read_system,
    read_text,
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
class _Branches:
    """A prompt and its completions."""

    prompt: Text
    completions: tuple[Text, ...]
    roles: tuple[Role, ...]
    scores: tuple[float | None, ...]


@dataclass(frozen=True)
class Template:
    """The prompt with its system message, and the other arguments of the chat template."""

    prompt: Text
    tools: tuple[Any, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _record(cells: Cells, shape: Shape, file: int, row: int) -> Record:
    branches = _READERS[shape.kind](cells, shape)
    template = read_template(cells, shape.source, branches.prompt, shape.wrap)
    carried = {
        name: read_number(cells.get(shape.source[name]), shape.source[name])
        for name in shape.carried
    }
    return Record(
        file,
        row,
        template.prompt,
        branches.completions,
        branches.roles,
        branches.scores,
        template.tools,
        template.options,
        carried,
    )


def _paired(cells: Cells, shape: Shape) -> _Branches:
    if not shape.has_prompt:
        return _paired_without_prompt(cells, shape)
    source = shape.source
    prompt = read_prompt(cells.get(source["prompt"]), source["prompt"])
    chosen, rejected = (_completion(cells, shape, prompt, name) for name in ("chosen", "rejected"))
    return _Branches(prompt, (chosen, rejected), _PAIR, _pair_scores(cells, source))


def _completion(cells: Cells, shape: Shape, prompt: Text, name: str = "completion") -> Text:
    column = shape.source[name]
    return shape.wrap.completion(cells.get(column), column, prompt)


def _pair_scores(cells: Cells, source: Source) -> tuple[float | None, ...]:
    columns = [source.get(name, "") for name in SCORES["paired"]]
    values = [cells.get(column) if column else None for column in columns]
    return tuple(
        None if value is None else read_number(value, column)
        for value, column in zip(values, columns, strict=True)
    )


def _paired_without_prompt(cells: Cells, shape: Shape) -> _Branches:
    source = shape.source
    if "prompt" in source and cells.get(source["prompt"]) is not None:
        raise BadRow("schema", f"has {source['prompt']!r}, which the first rows of the file lack")
    columns = source["chosen"], source["rejected"]
    chosen, rejected = (read_text(cells.get(column), column) for column in columns)
    shape.wrap.require_prompt_column(chosen, rejected, columns)
    length = _prompt_length(chosen, rejected)
    completions = chosen[length:], rejected[length:]
    for completion, column in zip(completions, columns, strict=True):
        if is_blank(completion):
            raise BadRow("empty_completion", f"{column!r} is empty behind the common prompt")
    if is_blank(chosen[:length]):
        raise BadRow("empty_prompt", f"{columns[0]!r} and {columns[1]!r} share no beginning")
    return _Branches(chosen[:length], completions, _PAIR, _pair_scores(cells, source))


def _prompt_length(chosen: Text, rejected: Text) -> int:
    """The length of what both start with; a continued turn of the assistant is left whole."""
    length = shared_length(chosen, rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        return length
    following = [each[length]["role"] for each in (chosen, rejected) if len(each) > length]
    while length and ASSISTANT in following and chosen[length - 1]["role"] == ASSISTANT:
        length -= 1
    return length


def shared_length(chosen: Text, rejected: Text) -> int:
    """Returns how many messages, or characters up to a blank, two completions share at the start.

    The blank itself belongs to the completions, as tokenizers want it.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _shared_words(chosen, rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise BadRow("schema", "of chosen and rejected one is text, the other a conversation")
    alike = (left == right for left, right in zip(chosen, rejected, strict=False))
    return sum(takewhile(bool, alike))


def _shared_words(chosen: str, rejected: str) -> int:
    if chosen == rejected:
        return len(chosen)
    shared = chosen[: _shared_characters(chosen, rejected)]
    after = chosen[len(shared) : len(shared) + 1], rejected[len(shared) : len(shared) + 1]
    if shared[-1:].isspace() or all(map(str.isspace, after)):
        return len(shared.rstrip())
    before_last_word, *last_word = shared.rsplit(None, 1) or [""]
    return len(before_last_word) if last_word else 0


def _shared_characters(left: str, right: str) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _unpaired(cells: Cells, shape: Shape) -> _Branches:
    source = shape.source
    prompt = read_prompt(cells.get(source["prompt"]), source["prompt"])
    completion = _completion(cells, shape, prompt)
    is_desirable = read_label(cells.get(source["label"]), source["label"])
    role = Role.DESIRABLE if is_desirable else Role.UNDESIRABLE
    return _Branches(prompt, (completion,), (role,), (None,))


def _scored(cells: Cells, shape: Shape) -> _Branches:
    source = shape.source
    prompt = read_prompt(cells.get(source["prompt"]), source["prompt"])
    column = source["completions"]
    candidates = read_list(cells.get(column), column)
    if not candidates:
        raise BadRow("empty_completion", f"{column!r} is an empty list")
    completions = [
        shape.wrap.completion(candidate, f"{column}[{index}]", prompt)
        for index, candidate in enumerate(candidates)
    ]
    roles = (Role.CANDIDATE,) * len(completions)
    return _Branches(prompt, tuple(completions), roles, _scores(cells, source, len(candidates)))


def _scores(cells: Cells, source: Source, count: int) -> tuple[float | None, ...]:
    """Of each candidate; none where the data has no such column yet."""
    if "scores" not in source:
        return (None,) * count
    column = source["scores"]
    scores = read_list(cells.get(column), column)
    if len(scores) != count:
        raise BadRow(
            "schema", f"{count} in {source['completions']!r} but {len(scores)} in {column!r}"
        )
    return tuple(read_number(score, f"{column}[{index}]") for index, score in enumerate(scores))


def _scored_long(cells: Cells, shape: Shape) -> _Branches:
    source = shape.source
    prompt = read_prompt(cells.get(source["prompt"]), source["prompt"])
    completion = _completion(cells, shape, prompt)
    score = read_number(cells.get(source["score"]), source["score"])
    return _Branches(prompt, (completion,), (Role.CANDIDATE,), (score,))


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


_PAIR = (Role.CHOSEN, Role.REJECTED)
_READERS: Mapping[Kind, Callable[[Cells, Shape], _Branches]] = {
    "paired": _paired,
    "unpaired": _unpaired,
    "scored": _scored,
    "scored_long": _scored_long,
}


Cells: TypeAlias = dict[str, Any]
TOO_DEEP = "a value is nested too deeply to be read"


def read_cells(payload: Payload, columns: Collection[str]) -> Iterator[Cells | BadRow]:
    """Yields the cells of each row, or the reason why it cannot be read."""
    if isinstance(payload, ArrowRows):
        return _arrow_cells(payload.batch)
    if isinstance(payload, CsvRows):
        return _csv_cells(payload, columns)
    return _json_cells(payload, columns)


def _json_cells(payload: JsonRows, columns: Collection[str]) -> Iterator[Cells | BadRow]:
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
        raise BadRow("bad_utf8", f"byte {error.start} of the row is not UTF-8") from None
    except ValueError as error:
        raise BadRow("schema", f"no valid JSON ({error}): {shown(text)}") from None
    if not isinstance(row, dict):
        raise BadRow("schema", f"no JSON object: {shown(row)}")
    if b"\\u" in text:
        for column in columns:
            require_characters(row.get(column), column)
    return row


def _csv_cells(payload: CsvRows, columns: Collection[str]) -> Iterator[Cells | BadRow]:
    return (_or_bad(_csv_row, row, payload.header, columns) for row in payload.rows)


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
    return any(_has_map(kind.field(place).type) for place in range(kind.num_fields))


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
