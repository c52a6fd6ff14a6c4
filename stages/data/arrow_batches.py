"""Batches of columnar files: complete, validated, and read in bounded parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa

from ...schemas.errors import BadDataError

_MAGIC = b"ARROW1"  # at both ends of a file; a stream has none
_END = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")  # of a stream; the second as before Arrow 0.15


def open_batches(
    source: pa.NativeFile, columns: Collection[str] | None
) -> Iterator[pa.RecordBatch]:
    """Yields the batches of an Arrow IPC file or stream, with these columns of them."""
    is_file = source.read(len(_MAGIC)) == _MAGIC
    opener = pa.ipc.open_file if is_file else pa.ipc.open_stream
    source.seek(0)
    names = opener(source).schema.names
    source.seek(0)
    wanted = [index for index, name in enumerate(names) if columns is None or name in columns]
    reader = opener(source, options=pa.ipc.IpcReadOptions(included_fields=wanted))
    if is_file:
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return iter(reader)


def require_all_batches(path: Path) -> None:
    """Refuses a truncated file or stream, or one with other batches than its footer lists."""
    with pa.memory_map(str(path)) as source:
        content = source.read_buffer()
        if content[: len(_MAGIC)].to_pybytes() != _MAGIC:
            batches, rest = _walked(content)
            if rest not in _END:
                raise BadDataError(_unended(path, batches, rest))
            return
        promised = pa.ipc.open_file(content).num_record_batches
        footer = int.from_bytes(content[-len(_MAGIC) - 4 : -len(_MAGIC)].to_pybytes(), "little")
        batches, _ = _walked(content[8 : len(content) - len(_MAGIC) - 4 - footer])
        if batches != promised:
            raise BadDataError(f"it holds {batches:,} batches, and its footer names {promised:,}")


def _walked(content: pa.Buffer) -> tuple[int, bytes]:
    """The number of batches in a stream, and the first bytes after them."""
    batches = end = 0
    with pa.BufferReader(content) as source:
        for message in pa.ipc.MessageReader.open_stream(source):
            batches += message.type == "record batch"
            end = source.tell()
    return batches, content[end : end + 9].to_pybytes()


def _unended(path: Path, batches: int, rest: bytes) -> str:
    if any(map(rest.startswith, _END)):
        return (
            f"other bytes follow the end of the stream, which is behind batch {batches:,}: give "
            "streams that were joined as files of their own"
        )
    return (
        f"the stream is cut off behind batch {batches:,}, or its writer was never closed: it lacks "
        "the end-of-stream marker. If no row is missing, write it again with the marker: "
        f"t = pyarrow.ipc.open_stream({path.name!r}).read_all(); "
        "w = pyarrow.ipc.new_stream('whole.arrow', t.schema); w.write_table(t); w.close()"
    )


def bounded(batch: pa.RecordBatch, rows: int, size: int) -> Iterator[pa.RecordBatch]:
    """Yields the validated batch in plain types, in parts of at most `rows` and `size` bytes."""
    _require_valid(batch)
    schema = pa.schema([(field.name, _plain(field.type)) for field in batch.schema])
    for start in range(0, batch.num_rows, rows):
        part = batch.slice(start, rows)
        if schema.types != batch.schema.types:  # a cast loads all of Arrow's compute functions
            part = part.cast(schema)
        yield from _halves(part.replace_schema_metadata(None), size)


def _require_valid(batch: pa.RecordBatch) -> None:
    """Refuses a batch whose lengths, offsets or indices are out of bounds, before any is used."""
    batch.validate()
    for column in batch.columns:
        kind = _as_bytes(column.type)
        (column if kind == column.type else column.view(kind)).validate(full=True)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """The type with binary instead of text: invalid UTF-8 is reported for its row later."""
    if isinstance(kind, pa.BaseExtensionType):
        return _as_bytes(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _as_bytes(kind.value_type), kind.ordered)
    if pa.types.is_run_end_encoded(kind):
        return pa.run_end_encoded(kind.run_end_type, _as_bytes(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_field(kind.key_field), _field(kind.item_field), kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_field(kind.value_field), kind.list_size)
    if pa.types.is_union(kind):
        return pa.union(map(_field, kind), kind.mode, kind.type_codes)
    if pa.types.is_struct(kind):
        return pa.struct(map(_field, kind))
    for is_kind, make in _LISTS:
        if is_kind(kind):
            return make(_field(kind.value_field))
    return _BYTES.get(kind, kind)


def _field(field: pa.Field) -> pa.Field:
    return field.with_type(_as_bytes(field.type))


_LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)
_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


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
