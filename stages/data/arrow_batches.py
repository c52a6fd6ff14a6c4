"""Batches of columnar files: complete, validated, and read in bounded parts."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.errors import BadDataError
from .large_rows import MIB, MOST_DECODED, LongRows, is_light, row_sizes, too_large

_MAGIC = b"ARROW1"  # at both ends of a file; a stream has none
_END = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")  # of a stream; the second as before Arrow 0.15


def open_batches(
    source: pa.NativeFile, columns: Collection[str], numbers: range, is_large: Sequence[bool]
) -> Iterator[pa.RecordBatch | None]:
    """Yields batches of an Arrow IPC file or stream, with these columns; None for large ones."""
    is_file = source.read(len(_MAGIC)) == _MAGIC
    opener = pa.ipc.open_file if is_file else pa.ipc.open_stream
    source.seek(0)
    names = opener(source).schema.names
    source.seek(0)
    wanted = [index for index, name in enumerate(names) if name in columns]
    reader = opener(source, options=pa.ipc.IpcReadOptions(included_fields=wanted))
    if is_file:
        for number in numbers:
            yield None if is_large[number] else reader.get_batch(number)
        return
    for number in range(numbers.stop):
        if is_large[number]:  # a stream cannot be read without it
            raise BadDataError(_too_much(f"batch {number:,} of the stream"))
        batch = reader.read_next_batch()
        if number >= numbers.start:
            yield batch


def column_names_in(path: Path) -> tuple[str, ...]:
    """The columns of an Arrow IPC file or stream."""
    with pa.memory_map(str(path)) as source:
        is_file = source.read(len(_MAGIC)) == _MAGIC
        source.seek(0)
        return tuple((pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).schema.names)


@dataclass(frozen=True)
class BatchSize:
    """What the metadata of a batch says of it, before any of it is decompressed."""

    rows: int
    decompressed: int  # bytes; 0 where nothing is compressed, as nothing is then copied


def batch_sizes(path: Path) -> list[BatchSize]:
    """The sizes of all record batches of an Arrow IPC file or stream, in its order."""
    with pa.memory_map(str(path)) as source:
        content = source.read_buffer()
        if content[: len(_MAGIC)].to_pybytes() == _MAGIC:
            content = _between(content)
        sizes = []
        with pa.BufferReader(content) as messages:
            for message in pa.ipc.MessageReader.open_stream(messages):
                if message.type == "schema":
                    continue
                if message.type not in {"record batch", "dictionary"}:
                    raise BadDataError(f"it holds a message of the kind {message.type!r}")
                size = _size_of(message)
                if message.type == "record batch":
                    sizes.append(size)
                elif size.decompressed > MOST_DECODED:
                    raise BadDataError(_too_much("a dictionary"))
        return sizes


def _too_much(what: str) -> str:
    return (
        f"{what} holds more than {MOST_DECODED // MIB} MiB once it is decompressed, in few "
        "values: take the largest out, or write a Parquet file"
    )


def _size_of(message: pa.ipc.Message) -> BatchSize:
    """The rows of a batch, and the bytes that its buffers say they decompress to."""
    body = message.body
    header = _Flat(message.metadata.to_pybytes()).root().table(2)
    batch = header if message.type == "record batch" else header.table(1)
    size = 0
    if batch.has(3):  # its compression
        for offset, length in batch.pairs(2):
            prefix = body[offset : offset + 8].to_pybytes() if length >= 8 else b""
            size += max(0, int.from_bytes(prefix, "little", signed=True))
    return BatchSize(batch.number(0), size)


@dataclass(frozen=True)
class _Flat:
    """A table in a flatbuffer that Arrow has checked, its fields by their numbers."""

    content: bytes
    at: int = 0

    def root(self) -> _Flat:
        return _Flat(self.content, self._read("<I", 0))

    def has(self, field: int) -> bool:
        return self._field(field) > 0

    def number(self, field: int) -> int:
        return self._read("<q", self._field(field)) if self.has(field) else 0

    def table(self, field: int) -> _Flat:
        at = self._field(field)
        return _Flat(self.content, at + self._read("<I", at))

    def pairs(self, field: int) -> Iterator[tuple[int, int]]:
        """The structs of two numbers in a vector."""
        if self.has(field):
            at = self._field(field)
            at += self._read("<I", at)
            for index in range(self._read("<I", at)):
                start = at + 4 + 16 * index
                yield self._read("<q", start), self._read("<q", start + 8)

    def _field(self, field: int) -> int:
        names = self.at - self._read("<i", self.at)
        if 4 + 2 * field >= self._read("<H", names):
            return 0
        offset = self._read("<H", names + 4 + 2 * field)
        return self.at + offset if offset else 0

    def _read(self, kind: str, at: int) -> int:
        try:
            return int(struct.unpack_from(kind, self.content, at)[0])
        except struct.error:
            raise BadDataError("the metadata of a batch leads out of itself") from None


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
        batches, _ = _walked(_between(content))
        if batches != promised:
            raise BadDataError(f"it holds {batches:,} batches, and its footer names {promised:,}")


def _between(content: pa.Buffer) -> pa.Buffer:
    """The stream in a file, which stands before its footer."""
    footer = int.from_bytes(content[-len(_MAGIC) - 4 : -len(_MAGIC)].to_pybytes(), "little")
    return content[8 : len(content) - len(_MAGIC) - 4 - footer]


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


def joined(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Batches of so many rows, made of smaller ones; of fewer rows where they hold much."""
    held, count, size = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        held.append(batch)
        count, size = count + batch.num_rows, size + batch.nbytes
        if count >= rows or size > _MOST_PLAIN:
            whole = pa.concat_batches(held)
            yield whole.slice(0, rows)
            rest = whole.slice(rows)
            held, count, size = ([rest], len(rest), rest.nbytes) if len(rest) else ([], 0, 0)
    if held:
        yield pa.concat_batches(held)


def bounded(
    batch: pa.RecordBatch, *, rows: int, size: int, most_row: int
) -> Iterator[pa.RecordBatch | LongRows]:
    """Yields the validated batch in plain types, in parts of at most `rows` and `size` bytes.

    Rows with more than `most_row` bytes are not in the parts, but told in their place.
    """
    _require_valid(batch)
    schema = pa.schema([(field.name, _plain(field.type)) for field in batch.schema])
    # A cast loads all of Arrow's functions.
    is_plain = schema.types == batch.schema.types
    for start in range(0, batch.num_rows, rows):
        for part in _readable(batch.slice(start, rows), most_row):
            if isinstance(part, LongRows):
                yield part
                continue
            plain = part if is_plain else part.cast(schema)
            yield from _halves(plain.replace_schema_metadata(None), size)


def _readable(batch: pa.RecordBatch, most_row: int) -> Iterator[pa.RecordBatch | LongRows]:
    """The batch without rows that are too large, in parts that are not large in plain types."""
    if is_light(batch, min(most_row, _MOST_PLAIN)):
        yield batch
        return
    sizes = row_sizes(batch)
    for first, stop in _runs(sizes > most_row):
        if sizes[first] > most_row:
            yield LongRows(tuple(too_large(one, most_row) for one in sizes[first:stop]))
        else:
            yield from _light_parts(batch.slice(first, stop - first), sizes[first:stop])


def _runs(flags: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The ranges of equal flags."""
    edges = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    return pairwise(edges)


def _light_parts(batch: pa.RecordBatch, sizes: NDArray[np.float64]) -> Iterator[pa.RecordBatch]:
    if batch.num_rows > 1 and sizes.sum() > _MOST_PLAIN:
        middle = batch.num_rows // 2
        yield from _light_parts(batch.slice(0, middle), sizes[:middle])
        yield from _light_parts(batch.slice(middle), sizes[middle:])
    else:
        yield batch


_MOST_PLAIN = 64 * MIB


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
