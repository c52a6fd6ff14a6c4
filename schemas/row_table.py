"""Rows as token ids: one declaration of their columns for memory, encoded slices and shards.

Rows and completions have columns of their own. In memory they are two Arrow record batches, with
the completions of all rows end to end and lists of tokens as byte strings, which Arrow copies at
once. Missing values are null. An encoded slice stores a row's completions as a list of structs, a
shard stores each of their columns as a list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .columns import (
    DTYPES,
    Ragged,
    arrow_of,
    bytes_of_texts,
    flattened,
    is_valid,
    joined_ranges,
    list_offsets,
    lists_over,
    numpy_of,
    offsets_of,
    packed,
    text_of,
    unpacked,
)
from .rows import Tree


def list_of(kind: pa.DataType, *, nullable: bool = False) -> pa.DataType:
    """The type of lists, with the element name that files use."""
    return pa.list_(pa.field("element", kind, nullable=nullable))


SOURCE = pa.struct(
    [pa.field("file", pa.string(), nullable=False), pa.field("row", pa.int64(), nullable=False)]
)
ROW: dict[str, pa.DataType] = {
    "row_id": pa.string(),  # a hex digest of the content; the first copy adds `-1`
    "source": SOURCE,  # the data file's identity in hex, and the row's number in it
    "prompt_key": pa.binary(16),  # a digest of the prompt's text, equal only for equal prompts
    "split_key": pa.uint64(),  # decides whether the row is held out
    "prompt_tokens": pa.int32(),
    "prompt_ids": list_of(pa.int32()),
    "prompt_cut": pa.int32(),  # tokens removed
}
COMPLETION: dict[str, pa.DataType] = {
    "completion_ids": list_of(pa.int32()),
    "role": pa.int8(),
    "score": pa.float64(),  # null: none in the data
    "cut": pa.int32(),  # tokens removed
    "num_tokens": pa.int32(),
    "ref_logp": pa.float64(),  # the sum over learned tokens; null: the cache is not scored
    "ref_token_logps": list_of(pa.float32()),  # missing: the cache keeps sums only
    # 1 for each learned token, else 0; null: one turn of the assistant, all learned.
    "completion_turns": list_of(pa.int16()),
}
CARRIED = pa.float64()  # any other column of a row: a number from the data
COUNTS = {"prompt_tokens": "prompt_ids", "num_tokens": "completion_ids"}  # lengths; in files only
RESERVED = frozenset([*ROW, *COMPLETION])  # names that no column of the data may have
KEYS = {"completion_key": pa.uint64()}  # a hash of a completion's ids; dropped after pairing
ID_DIGITS = 32  # hex digits of a row's digest
LEARNED = 1

_TYPES = {**ROW, **COMPLETION, **KEYS}


@dataclass(frozen=True)
class Rows:
    """Rows with all or some of their columns; each property is a column as a numpy array.

    The completions of row i are `completion_offsets[i]:completion_offsets[i + 1]`.
    """

    of_rows: pa.RecordBatch
    of_completions: pa.RecordBatch
    completion_offsets: NDArray[np.int64]  # (rows + 1,)

    @staticmethod
    def of(
        rows: Mapping[str, Any],
        completions: Mapping[str, Any],
        completion_offsets: NDArray[np.int64],
    ) -> Rows:
        """Rows from columns: numpy arrays, lists of text, `Ragged` or Arrow arrays."""
        return Rows(_batch(rows), _batch(completions), completion_offsets)

    def __len__(self) -> int:
        return len(self.completion_offsets) - 1

    def gather(
        self, rows: NDArray[np.int64], completions: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> Rows:
        """The rows at `rows`; `offsets` divide the completions at `completions` among them."""
        return Rows(_taken(self.of_rows, rows), _taken(self.of_completions, completions), offsets)

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """The rows at `rows`, in that order, with all of their completions."""
        counts = np.diff(self.completion_offsets)[rows]
        completions = joined_ranges(self.completion_offsets[rows], counts)
        return self.gather(rows, completions, offsets_of(counts))

    def between(self, start: int, stop: int) -> Rows:
        """Rows `start` to `stop`, without copying values."""
        first, last = self.completion_offsets[[start, stop]].tolist()
        return Rows(
            self.of_rows.slice(start, stop - start),
            self.of_completions.slice(first, last - first),
            self.completion_offsets[start : stop + 1] - first,
        )

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, in order; all have the same columns."""
        return Rows(
            pa.concat_batches([part.of_rows for part in parts]),
            pa.concat_batches([part.of_completions for part in parts]),
            offsets_of(np.concatenate([np.diff(part.completion_offsets) for part in parts])),
        )

    def with_columns(self, **columns: Any) -> Rows:
        """The same rows with some columns replaced or added."""
        is_inner = (COMPLETION | KEYS).keys()
        own = {name: columns[name] for name in columns if name not in is_inner}
        others = {name: columns[name] for name in columns if name in is_inner}
        return Rows(
            _replaced(self.of_rows, own),
            _replaced(self.of_completions, others),
            self.completion_offsets,
        )

    def without(self, *names: str) -> Rows:
        """The same rows without some columns of completions."""
        kept = [name for name in self.of_completions.schema.names if name not in names]
        return Rows(self.of_rows, self.of_completions.select(kept), self.completion_offsets)

    def in_key_order(self) -> Rows:
        """The rows sorted by prompt hash, digest, file and number.

        The order is therefore the same for any slices and workers.
        """
        keys = [*map(self.of_rows.column, ("prompt_key", "row_id"))]
        keys += self.of_rows.column("source").flatten()
        names = ("prompt", "row_id", "file", "row")
        by = pa.RecordBatch.from_arrays(keys, names=names)
        order = pc.sort_indices(by, sort_keys=[(name, "ascending") for name in names])
        return self.take(numpy_of(order).astype(np.int64))

    def to_batch(self) -> pa.RecordBatch:
        """One batch over the same memory: the last column has a list of structs for each row."""
        structs = self.of_completions.to_struct_array()
        lists = lists_over(self.completion_offsets, structs, pa.list_(structs.type))
        columns, names = self.of_rows.columns, self.of_rows.schema.names
        return pa.RecordBatch.from_arrays([*columns, lists], names=[*names, "completions"])

    @staticmethod
    def of_batches(batches: Sequence[pa.RecordBatch]) -> Rows:
        """The rows of batches that `to_batch` made, in order."""
        joined = pa.concat_batches(batches)
        *columns, lists = joined.columns
        return Rows(
            pa.RecordBatch.from_arrays(columns, names=joined.schema.names[:-1]),
            pa.RecordBatch.from_struct_array(flattened(lists)),
            list_offsets(lists),
        )

    def ids(self) -> tuple[str, ...]:
        """The id of each row."""
        return tuple(self.of_rows.column("row_id").to_pylist())

    @cached_property
    def file(self) -> NDArray[np.uint64]:
        """The identity of each row's data file."""
        digits = bytes_of_texts(self.of_rows.column("source").field("file"))
        return np.frombuffer(bytes.fromhex(digits.decode()), ">u8").astype(np.uint64)

    @cached_property
    def row(self) -> NDArray[np.int64]:
        """The number of each row in its data file."""
        return numpy_of(self.of_rows.column("source").field("row"))

    @cached_property
    def prompt_key(self) -> NDArray[np.bytes_]:
        """A digest of each row's prompt, S16."""
        return numpy_of(self.of_rows.column("prompt_key"))

    @cached_property
    def range_keys(self) -> NDArray[np.uint64]:
        """The key that decides a row's shard: the first eight bytes of that digest, as a number."""
        halves = np.ascontiguousarray(self.prompt_key).view(">u8").reshape(-1, 2)
        return halves[:, 0].astype(np.uint64)

    @cached_property
    def split_key(self) -> NDArray[np.uint64]:
        """The key of each row that decides whether it is held out."""
        return numpy_of(self.of_rows.column("split_key"))

    @cached_property
    def prompts(self) -> Ragged:
        """The token ids of prompts."""
        return unpacked(self.of_rows.column("prompt_ids"), np.int32)

    @cached_property
    def prompt_cut(self) -> NDArray[np.int32]:
        """The number of tokens that were cut from each prompt."""
        return numpy_of(self.of_rows.column("prompt_cut"))

    @cached_property
    def carried(self) -> dict[str, NDArray[np.float64]]:
        """The extra numeric columns of the data, by name."""
        schema = self.of_rows.schema
        return {
            name: numpy_of(column)
            for name, column in zip(schema.names, self.of_rows.columns, strict=True)
            if name not in ROW
        }

    @cached_property
    def row_of_completion(self) -> NDArray[np.int64]:
        """The index of each completion's row."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.completion_offsets))

    @cached_property
    def completions(self) -> Ragged:
        """The token ids of completions."""
        return unpacked(self.of_completions.column("completion_ids"), np.int32)

    @cached_property
    def roles(self) -> NDArray[np.int8]:
        """The role of each completion."""
        return numpy_of(self.of_completions.column("role"))

    @cached_property
    def scores(self) -> NDArray[np.float64]:
        """The score of each completion; NaN where the data have none."""
        return numpy_of(self.of_completions.column("score"))

    @cached_property
    def cut(self) -> NDArray[np.int32]:
        """The number of tokens that were cut from each completion."""
        return numpy_of(self.of_completions.column("cut"))

    @cached_property
    def completion_key(self) -> NDArray[np.uint64]:
        """A hash of each completion's ids."""
        return numpy_of(self.of_completions.column("completion_key"))

    @cached_property
    def learned(self) -> Ragged | None:
        """1 for each learned token of completions, else 0; None: all are learned."""
        lists = self.of_completions.column("completion_turns")
        if lists.null_count == len(lists):
            return None
        turns = unpacked(lists, np.int16)
        if not lists.null_count:
            return turns
        values = np.full(len(self.completions.values), LEARNED, np.int16)
        values[np.repeat(is_valid(lists), self.completions.lengths)] = turns.values
        return Ragged(values, self.completions.offsets)

    @property
    def is_learned(self) -> NDArray[np.bool_] | None:
        """Mask of the completions' learned tokens; None: all are learned."""
        return None if self.learned is None else self.learned.values > 0

    @cached_property
    def num_learned(self) -> NDArray[np.int64]:
        """The number of learned tokens of each completion."""
        return self.completions.lengths if self.learned is None else learned_counts(self.learned)

    @cached_property
    def logps(self) -> NDArray[np.float64]:
        """The reference's log-prob of each completion; NaN in a cache that is not scored."""
        return numpy_of(self.of_completions.column("ref_logp"))

    @cached_property
    def token_logps(self) -> Ragged | None:
        """The reference's log-probs of each completion's tokens; None: not stored."""
        if "ref_token_logps" not in self.of_completions.schema.names:
            return None
        return unpacked(self.of_completions.column("ref_token_logps"), np.float32)

    def completion_bytes(self) -> Iterator[bytes]:
        """The bytes that identify each completion: its ids and its learned tokens."""
        for completion, ids in enumerate(self.completions):
            yield bytes_of(
                ids.tobytes(), None if self.learned is None else self.learned[completion]
            )

    def trees(self) -> tuple[Tree, ...]:
        """The prompt tree of each row."""
        ends, completions = self.completion_offsets.tolist(), self.completions
        return tuple(
            Tree(prompt, tuple(completions[completion] for completion in range(start, end)))
            for prompt, start, end in zip(self.prompts, ends, ends[1:], strict=False)
        )


def learned_counts(turns: Ragged) -> NDArray[np.int64]:
    """The number of learned tokens of each completion."""
    return np.diff(offsets_of(turns.values > 0)[turns.offsets])


def fitted_length(ids: Sequence[int] | NDArray[np.int32], most: int, stops: Collection[int]) -> int:
    """The number of tokens that fit; a cut completion never ends with a stop token."""
    length = min(len(ids), most)
    while 0 < length < len(ids) and int(ids[length - 1]) in stops:
        length -= 1
    return length


def bytes_of(ids: bytes, turns: NDArray[np.int16] | None) -> bytes:
    """The bytes that identify a completion: its ids, and `turns` unless all are learned."""
    if turns is None or (turns == LEARNED).all():
        return ids
    return b"".join((ids, b"turns", turns.astype("<i2").tobytes()))


def digest_of(content: bytes) -> bytes:
    """The hash that names rows and completions."""
    return blake2b(content, digest_size=16).digest()


def keys_of(digests: Sequence[bytes]) -> NDArray[np.uint64]:
    """The keys of completions, from their digests."""
    return np.frombuffer(b"".join(digests), np.uint64)[::2]


def sources(files: Sequence[int] | pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    """The `source` column: each row's file identity and its number in that file."""
    names = files if isinstance(files, pa.Array) else text_of([f"{file:016x}" for file in files])
    return pa.StructArray.from_arrays([names, arrow_of(rows, pa.int64())], fields=list(SOURCE))


def _batch(columns: Mapping[str, Any]) -> pa.RecordBatch:
    arrays = [_column(name, values) for name, values in columns.items()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _column(name: str, values: Any) -> pa.Array:
    """A column in memory."""
    kind = _TYPES.get(name, CARRIED)
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, Ragged):
        numbers = values.values.astype(DTYPES[kind.value_type], copy=False)
        return packed(Ragged(numbers, values.offsets))
    if kind == pa.string():
        return text_of(values)
    return arrow_of(values, kind, ~np.isnan(values) if name == "score" else None)


def _replaced(batch: pa.RecordBatch, columns: Mapping[str, Any]) -> pa.RecordBatch:
    if not columns:
        return batch
    kept = dict(zip(batch.schema.names, batch.columns, strict=True))
    return _batch(kept | dict(columns))


def _taken(batch: pa.RecordBatch, indices: NDArray[np.int64]) -> pa.RecordBatch:
    return batch.take(arrow_of(indices, pa.int64()))
