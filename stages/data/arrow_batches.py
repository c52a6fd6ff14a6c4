"""Batches of columnar files: complete, validated, and in bounded parts of plain types."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...schemas.errors import BadDataError

_MAGIC = b"ARROW1"  # at the beginning of a file; a stream has none
_END = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")  # of a stream; the second as before Arrow 0.15


def open_batches(
    source: pa.NativeFile, columns: Collection[str], start: int, stop: int
) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow IPC file or stream from `start` to `stop`, with these columns."""
    wanted = [index for index, name in enumerate(_names_in(source)) if name in columns]
    reader = _opener(source)(source, options=pa.ipc.IpcReadOptions(included_fields=wanted))
    if isinstance(reader, pa.RecordBatchFileReader):
        return map(reader.get_batch, range(start, min(stop, reader.num_record_batches)))
    return islice(reader, start, stop)


def filled_columns(path: Path) -> tuple[str, ...]:
    """The columns of an Arrow IPC file or stream; none if it has no rows."""
    with pa.memory_map(str(path)) as source:
        names = _names_in(source)
        batches = open_batches(source, names[:1], 0, sys.maxsize)
        return tuple(names) if any(batch.num_rows for batch in batches) else ()


def _names_in(source: pa.NativeFile) -> list[str]:
    names: list[str] = _opener(source)(source).schema.names
    source.seek(0)
    return names


def _opener(source: pa.NativeFile) -> Callable[..., Any]:
    is_file = source.read(len(_MAGIC)) == _MAGIC
    source.seek(0)
    opener: Callable[..., Any] = pa.ipc.open_file if is_file else pa.ipc.open_stream
    return opener


def batch_sizes(path: Path) -> list[int]:
    """The bytes of each record batch of an Arrow IPC file or stream; in a file all are equal.

    A stream without its end is refused.
    """
    with pa.memory_map(str(path)) as source:
        if _opener(source) is pa.ipc.open_file:
            count = pa.ipc.open_file(source).num_record_batches
            return [path.stat().st_size // max(1, count)] * count
        sizes, end = [], 0
        for message in pa.ipc.MessageReader.open_stream(source):
            if message.type == "record batch":
                sizes.append(message.body.size)
            end = source.tell()
        source.seek(end)
        if source.read(9) not in _END:
            raise BadDataError(
                f"the stream does not end behind its batch {len(sizes):,}: it is cut off, its "
                "writer was not closed, or another stream follows"
            )
        return sizes


def bounded(batch: pa.RecordBatch, *, rows: int, size: int) -> Iterator[pa.RecordBatch]:
    """Yields the validated batch in plain types, in parts of at most `rows` and `size` bytes."""
    _require_valid(batch)
    schema = pa.schema([(field.name, _plain(field.type)) for field in batch.schema])
    # A cast loads all of Arrow's functions.
    is_plain = schema.types == batch.schema.types
    for start in range(0, batch.num_rows, rows):
        part = batch.slice(start, rows)
        plain = part if is_plain else part.cast(schema)
        yield from _halves(plain.replace_schema_metadata(None), size)


def _require_valid(batch: pa.RecordBatch) -> None:
    """Refuses lengths, offsets and indices that lead out of the batch, before any is used."""
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):  # which is reported for its row later
                raise


def _halves(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    if batch.num_rows > 1 and batch.nbytes > size:
        middle = batch.num_rows // 2
        yield from _halves(batch.slice(0, middle), size)
        yield from _halves(batch.slice(middle), size)
    else:
        yield batch


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type without dictionaries and views, whose slices keep all their data alive."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain(field.type)) for field in kind])
    return kind
