"""Columns that nothing reads: free text in them is refused, all else is noted.

Parquet and Arrow files are sampled: a few cells, spread over the file. JSON and CSV files are
checked row by row while they are encoded; before that, their first rows and some further on are
sampled.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.errors import UsageError
from ...schemas.rows import BadRow
from .data_shape import Shape
from .decode_rows import read_cells
from .file_formats import ARROW, ArrowRows, Payload
from .free_text import ColumnSample, Watch, holds_phrase, is_empty
from .input_files import InputFile, column_names, iter_chunks, iter_parts
from .validate import shown

SAMPLED_PARTS = 16  # of a file that are looked at; fewer where there are many files
ROWS = 1024  # of a JSON or CSV file
BYTES = 32 << 20  # of all columnar files together
CELLS = 16  # of a column in a payload
LATE_CELLS = 100
LISTED = 8  # columns
# What an exported cache has besides its rows: ids, log-probs and mismatched completions.
_EXPORTED = re.compile(r"row_id|prompt_cut|KL_.+|.+_(ids|cut)(_\d+)?|ref_.*logps(_\d+)?")
_LETTERS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)
# Columns that are a part of a prompt in another one.
_PARTS = {"instruction": ("input", "history"), "query": ("history",), "question": ("context",)}
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_MET, _PHRASES = "unread cells of ", "unread phrases of "  # begin counts; a column follows


def require_read(inputs: Sequence[InputFile], shape: Shape) -> Shape:
    """The shape with what is known of the columns it leaves unread; refuses free text in them."""
    require_whole_prompt(inputs, shape)
    skipped = {*shape.columns, *shape.left_out}
    found = _sampled(inputs, skipped)
    _refuse_media(found)
    _refuse_free_text(found, shape)
    unread = (name for name, sample in found.items() if sample.cells)
    return replace(
        shape,
        noted=tuple(name for name in unread if name not in shape.unread),
        unwatched=frozenset(skipped.union(name for name in found if found[name].phrase)),
    )


def require_whole_prompt(inputs: Sequence[InputFile], shape: Shape) -> None:
    """Refuses a prompt beside a column with a part of such prompts that the shape does not read."""
    asked = shape.source.get("prompt", "")
    if shape.declared.is_public:
        asked = shape.declared.columns[0]
    for name in _PARTS.get(asked, ()):
        if name in (*shape.columns, *shape.left_out):
            continue
        for file in inputs:
            if name in column_names(file) and not _is_empty_column(file, name):
                raise UsageError(
                    f"{file.path} has {name!r} beside {asked!r}, a part of the prompt that would "
                    "not be read. Join the two in your file, or leave it out with "
                    f"--map {name}=."
                )


def _is_empty_column(file: InputFile, name: str) -> bool:
    rows = (
        cells for chunk in iter_chunks([file], [name]) for cells in read_cells(chunk.payload, ())
    )
    return all(isinstance(cells, BadRow) or is_empty(cells.get(name)) for cells in rows)


def _refuse_media(found: Mapping[str, ColumnSample]) -> None:
    """Refuses columns of pictures, sounds or films, without which a row means something else."""
    if held := [name for name in _MEDIA if name in found and found[name].cells]:
        flags = " ".join(f"--map {name}=" for name in held)
        raise UsageError(
            f"The data have {' and '.join(map(repr, held))}, which no model here is given: only "
            f"text is read. Take rows without them, or leave them out with {flags}."
        )


def free_text_in(file: InputFile, read: Collection[str]) -> list[str]:
    """The columns of a file that hold free text, but for those that are read."""
    found = _sampled([file], read)
    return [name for name, sample in found.items() if sample.is_free_text]


def counts_of(watch: Watch) -> dict[str, int]:
    """The findings of a watch, as counts for the notes of a slice."""
    with_phrases = (name for name in watch.met if watch.met[name])
    names = [*(_MET + ascii(name) for name in watch.met)]
    return dict.fromkeys([*names, *(_PHRASES + ascii(name) for name in with_phrases)], 1)


def require_watched_read(
    inputs: Sequence[InputFile], shape: Shape, notes: Counter[str]
) -> tuple[str, ...]:
    """The columns that were met behind the sampled rows alone; refuses free text in them.

    What was counted of them is taken out of the notes.
    """
    met, phrases = _taken(notes, _MET), _taken(notes, _PHRASES)
    _refuse_free_text(
        _late(inputs, [name for name in phrases if name not in shape.left_out]), shape
    )
    known = {*shape.noted, *shape.unread, *shape.left_out}
    return tuple(name for name in met if name not in known)


def _taken(notes: Counter[str], mark: str) -> list[str]:
    counted = [note for note in notes if note.startswith(mark)]
    for note in counted:
        del notes[note]
    return sorted(ast.literal_eval(note.removeprefix(mark)) for note in counted)


def not_read(names: Sequence[str]) -> str:
    """Says which columns are not read."""
    listed = ", ".join(map(repr, names[:LISTED]))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"not read, as they hold no free text: {listed}{more}"


def _refuse_free_text(found: Mapping[str, ColumnSample], shape: Shape) -> None:
    named = {name: sample for name, sample in found.items() if sample.is_free_text}
    if not named:
        return
    lines = [
        f"{name!r} ({shown(one.phrase)}): {_ways(name, one, shape)}" for name, one in named.items()
    ]
    if len(named) > 1:
        flags = " ".join(f"--map {shlex.quote(f'{name}=')}" for name in named)
        lines.append(f"all of them are left out with {flags}")
    listed = "\n  ".join(lines)
    where = next(iter(named.values())).where
    raise UsageError(
        f"{where} holds free text that nothing reads, so what is learned would lack it:\n  {listed}"
    )


def _ways(name: str, sample: ColumnSample, shape: Shape) -> str:
    """A hint for the user: the flag that reads a column, or leaves it out."""
    left_out = f"or leave it out with --map {shlex.quote(f'{name}=')}."
    if ours := _readable_as(name, sample, shape):
        return f"read it with --map {shlex.quote(f'{ours}={name}')}, {left_out}"
    begins = " and ".join(map(repr, shape.declared.columns))  # all of them with the prompt
    into = repr(shape.source["prompt"]) if shape.has_prompt else begins
    return f"no --map reads it: write it into {into} in your file (unless it is there), {left_out}"


def _readable_as(name: str, sample: ColumnSample, shape: Shape) -> str:
    """A column of ours that the data lack and that this one may be, by its name; or nothing."""
    meant = {"system": "system", "tool": "tools", "function": "tools"}
    fitting = [ours for word, ours in meant.items() if word in name.lower()]
    if not (shape.has_prompt or shape.declared.is_public or sample.has_messages):
        fitting.append("prompt")
    return next((ours for ours in fitting if ours not in shape.optional), "")


def _sampled(inputs: Sequence[InputFile], skipped: Collection[str]) -> dict[str, ColumnSample]:
    """Some cells of each unread column."""
    found: dict[str, ColumnSample] = {}
    count = max(1, min(SAMPLED_PARTS, 4 * SAMPLED_PARTS // len(inputs)))
    for file in inputs:
        for name, cell in _cells(file, skipped, count, BYTES // len(inputs) // count):
            if name not in skipped:
                found.setdefault(name, ColumnSample()).add(cell, str(file.path))
    return found


def _cells(
    file: InputFile, skipped: Collection[str], count: int, size: int
) -> Iterator[tuple[str, Any]]:
    """Cells of a file with the names of their columns."""
    names = [name for name in column_names(file) if name not in skipped]
    if "row_id" in names and any(name.startswith("ref_") for name in names):
        names = [name for name in names if not _EXPORTED.fullmatch(name)]
    payloads = (chunk.payload for chunk in iter_chunks([file], names, rows_per_chunk=1))
    first = next(payloads, None)
    if isinstance(first, ArrowRows):
        kinds = {column.name: column.type for column in first.batch.schema}
        names = [name for name, kind in kinds.items() if _has_text(kind)]
        others = (name for name, kind in kinds.items() if name not in names)
        yield from ((name, True) for name in others if not pa.types.is_null(kinds[name]))
        if not names:
            return
    if file.format in ARROW:
        # Batches can only be passed one after the other: every so many is sampled.
        step = max(1, file.bytes // (count * size))
        for chunk in islice(iter_chunks([file], names), 0, None, step):
            yield from _of_payload(chunk.payload, ROWS)
    else:
        yield from _of_parts(list(iter_parts(file, names, count)), size)


def _has_text(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_text(kind.field(index).type) for index in range(kind.num_fields))
    return any(is_kind(kind) for is_kind in _LETTERS)


def _of_parts(parts: Sequence[Iterator[Payload]], size: int) -> Iterator[tuple[str, Any]]:
    """Cells of the first so many bytes of each part, or of its first rows."""
    for part in parts:
        left = size
        for payload in part:
            yield from _of_payload(payload, ROWS // len(parts))
            left -= payload.batch.nbytes if isinstance(payload, ArrowRows) else size
            if left <= 0:
                break


def _of_payload(payload: Payload, rows: int) -> Iterator[tuple[str, Any]]:
    if isinstance(payload, ArrowRows):
        yield from _spread(payload.batch)
        return
    read = (cells for cells in read_cells(payload, ()) if not isinstance(cells, BadRow))
    for cells in islice(read, rows):
        yield from cells.items()


def _spread(batch: pa.RecordBatch) -> Iterator[tuple[str, Any]]:
    """A few cells of each column that are not empty, evenly spaced."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        filled = np.flatnonzero(_lengths(column))
        count = min(CELLS, len(filled))
        for index in np.linspace(0, len(filled) - 1, count).astype(int) if count else ():
            with suppress(UnicodeDecodeError):  # bytes that are no text
                cell = column[int(filled[index])].as_py()
                yield name, cell.decode() if isinstance(cell, bytes) else cell


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    """The lengths of texts or lists; 1 of anything else."""
    kind = column.type
    wide = kind in (pa.large_string(), pa.large_binary()) or pa.types.is_large_list(kind)
    if not (wide or kind in (pa.string(), pa.binary()) or pa.types.is_list(kind)):
        return np.ones(len(column), dtype=np.int64)
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int64 if wide else np.int32)
    return np.diff(offsets[column.offset : column.offset + len(column) + 1]).astype(np.int64)


def _late(inputs: Sequence[InputFile], names: Sequence[str]) -> dict[str, ColumnSample]:
    """Cells of columns of JSON and CSV files, each from its first phrase on."""
    found = {name: ColumnSample() for name in names}
    lacking = set(found)
    for chunk in iter_chunks(inputs, ()) if names else ():
        if isinstance(chunk.payload, ArrowRows):
            continue
        for row, cells in enumerate(read_cells(chunk.payload, ()), start=chunk.row):
            if isinstance(cells, BadRow):
                continue
            for name in [*lacking]:
                if found[name].cells or holds_phrase(cells.get(name)):
                    found[name].add(cells.get(name), f"{inputs[chunk.file].path} row {row:,}")
                if found[name].cells == LATE_CELLS:
                    lacking.remove(name)
        if not lacking:
            break
    return found
