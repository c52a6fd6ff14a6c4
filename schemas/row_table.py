"""Rows as token ids: their columns, declared once for memory, for encoded slices and for shards.

A row has columns of its own, and completions with columns of theirs. In memory these are two Arrow
record batches, the completions of all rows end to end; lists of tokens are byte strings there,
which Arrow takes and joins as a whole. What is missing is null. A slice of the data holds the
completions of a row as a list of structs, a shard holds each of their columns as a list.
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
    """The type of lists, as files name it."""
    return pa.list_(pa.field("element", kind, nullable=nullable))


SOURCE = pa.struct(
    [pa.field("file", pa.string(), nullable=False), pa.field("row", pa.int64(), nullable=False)]
)
ROW: dict[str, pa.DataType] = {
    "row_id": pa.string(),  # a digest of its content in hex; `-1` follows it in the first copy
    "source": SOURCE,  # the identity of its data file in hex, and its number there
    "prompt_key": pa.binary(16),  # a digest of the prompt's text, equal only for equal prompts
    "split_key": pa.uint64(),  # decides the side of the held-out split
    "prompt_tokens": pa.int32(),
    "prompt_ids": list_of(pa.int32()),
    "prompt_cut": pa.int32(),  # tokens removed
}
COMPLETION: dict[str, pa.DataType] = {
    "completion_ids": list_of(pa.int32()),
    "role": pa.int8(),
    "score": pa.float64(),  # null: the data give none
    "cut": pa.int32(),  # tokens removed
    "num_tokens": pa.int32(),
    "ref_logp": pa.float64(),  # the sum over learned tokens; null: the cache is not scored
    "ref_token_logps": list_of(pa.float32()),  # not there: the cache keeps no log-probs of tokens
    # 1 for each token that is learned, else 0; null: one turn of the assistant, all learned.
    "completion_turns": list_of(pa.int16()),
}
CARRIED = pa.float64()  # any other column of a row: a number that the data bring
COUNTS = {"prompt_tokens": "prompt_ids", "num_tokens": "completion_ids"}  # lengths; in files only
RESERVED = frozenset([*ROW, *COMPLETION])  # no column that the data bring has such a name
KEYS = {"completion_key": pa.uint64()}  # a hash of a completion's ids; until it has its partners
ID_DIGITS = 32  # hex digits of a row's digest
LEARNED = 1

_TYPES = {**ROW, **COMPLETION, **KEYS}


@dataclass(frozen=True)
class Rows:
    """Rows with all or some of their columns; completions of row i are `branch_offsets[i]:[i+1]`.

    Each property is a column as numpy sees it, over the same memory.
    """

    of_rows: pa.RecordBatch
    of_branches: pa.RecordBatch
    branch_offsets: NDArray[np.int64]  # (rows + 1,)

    @staticmethod
    def of(
        rows: Mapping[str, Any], branches: Mapping[str, Any], branch_offsets: NDArray[np.int64]
    ) -> Rows:
        """Rows of columns: numpy arrays, lists of text, `Ragged` or Arrow's arrays."""
        return Rows(_batch(rows), _batch(branches), branch_offsets)

    def __len__(self) -> int:
        return len(self.branch_offsets) - 1

    def gather(
        self, rows: NDArray[np.int64], branches: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> Rows:
        """The rows at `rows`; `offsets` divide the completions at `branches` among them."""
        return Rows(_taken(self.of_rows, rows), _taken(self.of_branches, branches), offsets)

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """The rows at `rows`, in that order, with all of their completions."""
        counts = np.diff(self.branch_offsets)[rows]
        branches = joined_ranges(self.branch_offsets[rows], counts)
        return self.gather(rows, branches, offsets_of(counts))

    def between(self, start: int, stop: int) -> Rows:
        """Rows `start` to `stop`, without copying values."""
        first, last = self.branch_offsets[[start, stop]].tolist()
        return Rows(
            self.of_rows.slice(start, stop - start),
            self.of_branches.slice(first, last - first),
            self.branch_offsets[start : stop + 1] - first,
        )

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """The rows of several with the same columns, in order."""
        return Rows(
            pa.concat_batches([part.of_rows for part in parts]),
            pa.concat_batches([part.of_branches for part in parts]),
            offsets_of(np.concatenate([np.diff(part.branch_offsets) for part in parts])),
        )

    def with_columns(self, **columns: Any) -> Rows:
        """The same rows with other values in some columns, or with more columns."""
        is_inner = (COMPLETION | KEYS).keys()
        own = {name: columns[name] for name in columns if name not in is_inner}
        others = {name: columns[name] for name in columns if name in is_inner}
        return Rows(
            _replaced(self.of_rows, own), _replaced(self.of_branches, others), self.branch_offsets
        )

    def without(self, *names: str) -> Rows:
        """The same rows without some columns of completions."""
        kept = [name for name in self.of_branches.schema.names if name not in names]
        return Rows(self.of_rows, self.of_branches.select(kept), self.branch_offsets)

    def in_key_order(self) -> Rows:
        """The rows sorted by their prompts' hash, then by digest; equal rows as the data have them.

        So the order is the same for any slices and workers.
        """
        keys = [*map(self.of_rows.column, ("prompt_key", "row_id"))]
        keys += self.of_rows.column("source").flatten()
        names = ("prompt", "row_id", "file", "row")
        by = pa.RecordBatch.from_arrays(keys, names=names)
        order = pc.sort_indices(by, sort_keys=[(name, "ascending") for name in names])
        return self.take(numpy_of(order).astype(np.int64))

    def to_batch(self) -> pa.RecordBatch:
        """One batch over the same memory: the last column has a list of structs for each row."""
        structs = self.of_branches.to_struct_array()
        lists = lists_over(self.branch_offsets, structs, pa.list_(structs.type))
        columns, names = self.of_rows.columns, self.of_rows.schema.names
        return pa.RecordBatch.from_arrays([*columns, lists], names=[*names, "completions"])

    @staticmethod
    def of_batches(batches: Sequence[pa.RecordBatch]) -> Rows:
        """The rows of such batches, in order."""
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
        """The key of each row that decides the side of the held-out split."""
        return numpy_of(self.of_rows.column("split_key"))

    @cached_property
    def prompts(self) -> Ragged:
        """The token ids of prompts."""
        return unpacked(self.of_rows.column("prompt_ids"), np.int32)

    @cached_property
    def prompt_cut(self) -> NDArray[np.int32]:
        """The number of tokens that were removed of each prompt."""
        return numpy_of(self.of_rows.column("prompt_cut"))

    @cached_property
    def carried(self) -> dict[str, NDArray[np.float64]]:
        """The numbers that the data bring, by name."""
        schema = self.of_rows.schema
        return {
            name: numpy_of(column)
            for name, column in zip(schema.names, self.of_rows.columns, strict=True)
            if name not in ROW
        }

    @cached_property
    def row_of_branch(self) -> NDArray[np.int64]:
        """The index of each completion's row."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.branch_offsets))

    @cached_property
    def completions(self) -> Ragged:
        """The token ids of completions."""
        return unpacked(self.of_branches.column("completion_ids"), np.int32)

    @cached_property
    def roles(self) -> NDArray[np.int8]:
        """The role of each completion."""
        return numpy_of(self.of_branches.column("role"))

    @cached_property
    def scores(self) -> NDArray[np.float64]:
        """The score of each completion; NaN where the data give none."""
        return numpy_of(self.of_branches.column("score"))

    @cached_property
    def cut(self) -> NDArray[np.int32]:
        """The number of tokens that were removed of each completion."""
        return numpy_of(self.of_branches.column("cut"))

    @cached_property
    def completion_key(self) -> NDArray[np.uint64]:
        """A hash of each completion's ids."""
        return numpy_of(self.of_branches.column("completion_key"))

    @cached_property
    def learned(self) -> Ragged | None:
        """1 for each token of completions that is learned, else 0; None: all are."""
        lists = self.of_branches.column("completion_turns")
        if lists.null_count == len(lists):
            return None
        told = unpacked(lists, np.int16)
        if not lists.null_count:
            return told
        values = np.full(len(self.completions.values), LEARNED, np.int16)
        values[np.repeat(is_valid(lists), self.completions.lengths)] = told.values
        return Ragged(values, self.completions.offsets)

    @property
    def is_learned(self) -> NDArray[np.bool_] | None:
        """Mask of the completions' tokens that are learned; None: all of them."""
        return None if self.learned is None else self.learned.values > 0

    @cached_property
    def num_learned(self) -> NDArray[np.int64]:
        """The number of learned tokens of each completion."""
        return self.completions.lengths if self.learned is None else learned_counts(self.learned)

    @cached_property
    def logps(self) -> NDArray[np.float64]:
        """The reference's log-prob of each completion; NaN where the cache is not scored."""
        return numpy_of(self.of_branches.column("ref_logp"))

    @cached_property
    def token_logps(self) -> Ragged | None:
        """The reference's log-probs of each completion's tokens; None: they are not kept."""
        if "ref_token_logps" not in self.of_branches.schema.names:
            return None
        return unpacked(self.of_branches.column("ref_token_logps"), np.float32)

    def completion_bytes(self) -> Iterator[bytes]:
        """What identifies each completion: its ids, and what of them is learned."""
        for branch, ids in enumerate(self.completions):
            yield bytes_of(ids.tobytes(), None if self.learned is None else self.learned[branch])

    def trees(self) -> tuple[Tree, ...]:
        """The prompt tree of each row."""
        ends, completions = self.branch_offsets.tolist(), self.completions
        return tuple(
            Tree(prompt, tuple(completions[branch] for branch in range(start, end)))
            for prompt, start, end in zip(self.prompts, ends, ends[1:], strict=False)
        )


def learned_counts(turns: Ragged) -> NDArray[np.int64]:
    """The number of learned tokens of each completion."""
    return np.diff(offsets_of(turns.values > 0)[turns.offsets])


def fitted_length(ids: Sequence[int] | NDArray[np.int32], most: int, stops: Collection[int]) -> int:
    """How many tokens of a completion fit; one that is cut never ends with a stop token."""
    length = min(len(ids), most)
    while 0 < length < len(ids) and int(ids[length - 1]) in stops:
        length -= 1
    return length


def bytes_of(ids: bytes, turns: NDArray[np.int16] | None) -> bytes:
    """What identifies a completion; of one turn that is all learned, the ids alone do."""
    if turns is None or (turns == LEARNED).all():
        return ids
    return b"".join((ids, b"turns", turns.astype("<i2").tobytes()))


def digest_of(content: bytes) -> bytes:
    """The hash that names rows and completions."""
    return blake2b(content, digest_size=16).digest()


def keys_of(digests: Sequence[bytes]) -> NDArray[np.uint64]:
    """Digests of completions as the keys that stand for them."""
    return np.frombuffer(b"".join(digests), np.uint64)[::2]


def sources(files: Sequence[int] | pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    """The column that says where rows come from: the identities of files, and numbers there."""
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
